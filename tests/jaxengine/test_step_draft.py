from jaxengine.request import Request
from jaxengine.sampling_params import SamplingParams
from jaxengine.step_draft import StepDraft
from jaxengine.step_time import StepWork
from jaxengine.tenants import Tenant


def make_request(
    num_prompt: int, *, computed: int = 0, output: int = 0, weight: float = 1.0, **params
) -> Request:
    """A running request with so many computed tokens, all of them charged."""
    request = Request(
        "a",
        tuple(range(num_prompt)),
        SamplingParams(max_tokens=99, **({"temperature": 0.0} | params)),
        seed=0,
        arrival_time_s=0.0,
    )
    request.token_ids += [7] * output
    request.num_computed_tokens = request.num_charged_tokens = computed
    request.account = Tenant("t", weight)
    request.row = 3
    request.block_ids = [1, 2]
    return request


def test_an_empty_draft_is_an_empty_step():
    draft = StepDraft(16)
    output = draft.output(num_preempted=0)
    assert output.is_empty
    assert (output.num_tokens, output.wasted_slots) == (0, 0)
    assert draft.work == StepWork(0, 0, True, 0, 0, 0, 0)


def test_a_part_of_a_prompt_is_counted_and_charged():
    draft, request = StepDraft(16), make_request(10)
    draft.take(request, 4)
    [item] = draft.scheduled
    assert (item.first_position, item.num_new_tokens, item.row) == (0, 4, 3)
    assert (item.samples, item.last_is_pending) == (False, False)
    assert (draft.budget, draft.num_decodes, draft.has_prompts) == (12, 0, True)
    assert (request.num_computed_tokens, request.num_pending_tokens) == (4, 0)
    assert request.account.service == 4
    # Token i attends to i + 1 positions: 1 + 2 + 3 + 4.
    assert draft.work == StepWork(4, 1, False, 0, 10, 0, 4)


def test_the_rest_of_a_prompt_samples():
    draft, request = StepDraft(16), make_request(10, computed=4, temperature=1.0)
    draft.take(request, 6)
    assert draft.scheduled[0].samples
    assert request.num_pending_tokens == 1
    # 5 + 6 + ... + 10 = 45; drawn at random.
    assert draft.work == StepWork(6, 1, False, 0, 45, 1, 10)


def test_one_token_of_a_prompt_counts_as_a_decode():
    draft, request = StepDraft(16), make_request(10, computed=8)
    draft.take(request, 1)
    assert (draft.num_decodes, draft.has_prompts) == (1, False)
    assert not draft.scheduled[0].samples
    assert draft.work == StepWork(1, 1, True, 9, 0, 0, 0)


def test_a_token_known_on_the_host_and_one_that_is_pending():
    draft = StepDraft(16)
    known, pending = make_request(10, computed=10, output=1), make_request(10, computed=10)
    pending.num_pending_tokens = 1
    draft.take_token(known)
    draft.take_token(pending)
    assert [item.last_is_pending for item in draft.scheduled] == [False, True]
    assert all(item.samples and item.num_new_tokens == 1 for item in draft.scheduled)
    assert (known.num_pending_tokens, pending.num_pending_tokens) == (1, 2)
    assert (known.num_computed_tokens, pending.num_computed_tokens) == (11, 11)
    assert draft.work == StepWork(2, 2, True, 22, 0, 0, 0)


def test_take_and_take_token_do_the_same_with_one_token():
    outputs = []
    for method in ("take", "take_token"):
        draft, request = StepDraft(16), make_request(10, computed=10, output=1, temperature=1.0)
        getattr(draft, method)(request, *([1] if method == "take" else []))
        item = draft.scheduled[0]._replace(request=None)
        outputs.append((item, draft.work, draft.budget, request.num_pending_tokens))
        outputs[-1] += (request.account.service, request.num_charged_tokens)
    assert outputs[0] == outputs[1]


def test_an_output_token_costs_twice_a_prompt_token_and_weights_divide():
    draft = StepDraft(16)
    request = make_request(10, computed=10, output=1, weight=4.0)
    draft.take_token(request)
    assert request.account.service == 0.5


def test_what_a_preemption_lost_is_not_charged_again():
    draft, request = StepDraft(32), make_request(10, computed=14, output=5)
    request.num_computed_tokens = 0
    draft.take(request, 12)
    assert (request.account.service, request.num_charged_tokens) == (0, 14)
    draft.take(request, 3)  # the fifteenth token is new, and an output token
    assert (request.account.service, request.num_charged_tokens) == (2, 15)


def test_a_dropped_request_leaves_no_trace_but_its_charge():
    draft = StepDraft(16)
    stays = make_request(10, computed=10, output=1)
    draft.take_token(stays)
    before = (draft.work, draft.budget, draft.num_decodes, list(draft.scheduled))
    dropped = make_request(20, computed=20, output=1, temperature=1.0)
    draft.take_token(dropped)
    draft.drop(dropped)
    assert (draft.work, draft.budget, draft.num_decodes, draft.scheduled) == before
    assert (dropped.num_computed_tokens, dropped.num_pending_tokens) == (20, 0)
    assert dropped.account.service == 2
    draft.take_token(dropped)
    assert dropped.account.service == 2


def test_dropping_what_is_not_in_the_step_does_nothing():
    draft = StepDraft(16)
    draft.drop(make_request(10))
    assert draft.output(num_preempted=0).is_empty


def test_wasted_slots_take_budget_and_time_but_are_no_tokens():
    draft = StepDraft(16)
    draft.take_token(make_request(10, computed=10, output=1))
    row = make_request(10, computed=10)
    draft.pad(row, 10, 5)
    draft.fill_ended_row(row, 15)
    output = draft.output(num_preempted=3)
    assert (output.num_tokens, output.padding_slots, len(output.ended_rows)) == (1, 5, 1)
    assert (output.wasted_slots, output.num_preempted, draft.budget) == (6, 3, 9)
    # The token attends to 11 positions and the filler of the ended row to 16; the padding to 11 +
    # 12 + 13 + 14 + 15.
    assert output.work == StepWork(7, 3, False, 27, 65, 0, 15)
    assert (row.num_computed_tokens, row.num_pending_tokens, row.account.service) == (10, 0, 0)
    for item in output.items[1:]:
        assert (item.is_filler, item.samples, item.block_ids) == (True, False, row.block_ids)


def test_a_step_of_padding_alone_is_not_empty():
    draft = StepDraft(16)
    draft.pad(make_request(10, computed=10), 10, 16)
    output = draft.output(num_preempted=0)
    assert not output.is_empty
    assert output.num_tokens == 0
