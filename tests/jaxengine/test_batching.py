import pytest

from engine_loop import small_config
from jaxengine.batching import STATIC_PATIENCE_S, ClosedBatch
from jaxengine.kv_cache_manager import KVCacheManager
from jaxengine.outputs import FinishReason
from jaxengine.request import Request
from jaxengine.sampling_params import SamplingParams
from jaxengine.step_draft import StepDraft


def closed_batch(batching: str) -> ClosedBatch:
    config = small_config(batching=batching, batch_window_s=3.0)
    kv = KVCacheManager(num_blocks=17, block_size=8, enable_prefix_caching=False)
    return ClosedBatch(config, kv)


def request(num_prompt: int, max_tokens: int = 9, *, computed: int = 0) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    made = Request("a", (1,) * num_prompt, params, seed=0, arrival_time_s=0.0)
    made.num_computed_tokens = computed
    return made


def running(request: Request) -> Request:
    request.row = 0
    return request


def begin(batch: ClosedBatch, *members: Request) -> list[Request]:
    assert [batch.add(member) for member in members] == [0] * len(members)
    batch.reserve()
    return list(members)


def compute(*members: Request) -> None:
    for member in members:
        member.num_computed_tokens = member.num_prompt_tokens


def padding(batch: ClosedBatch, *, budget: int) -> list[tuple[int, int]]:
    """First position and number of slots of what a step takes."""
    draft = StepDraft(budget)
    batch.pad_prompts(draft)
    return [(item.first_position, item.num_new_tokens) for item in draft.padding]


def arrived(*times_s):
    params = SamplingParams(max_tokens=9)
    return [Request("a", (1,), params, seed=0, arrival_time_s=time_s) for time_s in times_s]


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_a_batch_is_full_when_all_rows_are_taken(batching):
    batch = closed_batch(batching)
    batch.note_arrival(10.0)
    is_open = [batch.opens_at_s(arrived(*[10.0] * number)) <= 10.0 for number in (1, 3, 4, 5)]
    assert is_open == [False, False, True, True]


def test_a_dynamic_batch_waits_for_its_window_from_the_first_arrival():
    batch = closed_batch("dynamic")
    batch.note_arrival(12.0)
    assert batch.opens_at_s(arrived(12.0, 10.0)) == 13.0


def test_a_static_batch_waits_until_nobody_new_has_come_for_long():
    batch = closed_batch("static")
    batch.note_arrival(10.0)
    assert batch.opens_at_s(arrived(10.0)) == 10.0 + STATIC_PATIENCE_S
    batch.note_arrival(12.0)
    assert batch.opens_at_s(arrived(10.0, 12.0)) == 12.0 + STATIC_PATIENCE_S


def test_rows_are_as_long_as_the_longest_prompt_and_the_longest_answer():
    # 64 tokens at most, and 16 blocks of 8.
    batch = closed_batch("static")
    assert batch.has_room(request(40, 24))
    begin(batch, request(40, 4))
    assert batch.has_room(request(4, 24))
    assert not batch.has_room(request(4, 25))
    batch = closed_batch("static")
    begin(batch, request(20, 4), request(4, 20), request(1, 1))  # three times 40 slots: 15 blocks
    assert not batch.has_room(request(1, 1))
    batch.disband()
    assert batch.has_room(request(40, 24))


def test_no_batch_has_more_rows_than_there_are():
    batch = closed_batch("static")
    begin(batch, *(request(1, 1) for _ in range(3)))
    assert batch.has_room(request(1, 1))
    begin(batch, request(1, 1))
    assert not batch.has_room(request(1, 1))


def test_prompts_are_padded_to_the_longest():
    batch = closed_batch("static")
    assert not batch.is_prefilling
    rows = begin(batch, request(10), request(4), request(7))
    assert (batch.is_prefilling, batch.prompts) == (True, rows)
    assert padding(batch, budget=16) == []  # their own prompts come first
    compute(*rows[:2])
    assert batch.prompts == rows[2:]
    assert [padding(batch, budget=budget) for budget in (0, 4, 16)] == [[], [(4, 4)], [(8, 2)]]
    assert batch.is_prefilling
    compute(rows[2])
    assert padding(batch, budget=16) == [(7, 3)]
    assert not batch.is_prefilling


def test_a_step_holds_no_more_sequences_than_there_are_rows():
    batch = closed_batch("static")
    compute(*begin(batch, *(request(length) for length in (9, 4, 5, 6))))
    draft = StepDraft(100)
    for _ in range(3):
        draft.take_token(running(request(1, computed=1)))
    batch.pad_prompts(draft)
    assert [item.first_position for item in draft.padding] == [4]


def test_a_batch_of_one_has_no_padding():
    batch = closed_batch("static")
    compute(*begin(batch, request(10)))
    assert not batch.is_prefilling


def test_rows_that_ended_go_on_as_long_as_somebody_decodes():
    batch = closed_batch("static")
    ended, ends, lives = rows = begin(batch, request(4, 3), request(4, 1), request(4, 2))
    compute(*rows)
    ended.finish(FinishReason.STOP)
    ends.num_pending_tokens = 1  # its only token is in flight
    draft = StepDraft(100)
    batch.fill_ended_rows(draft)
    assert draft.ended_rows == []
    draft.take_token(running(lives))  # its last one, and yet no waste
    lives.num_pending_tokens = 2
    batch.fill_ended_rows(draft)
    assert [(item.request, item.first_position) for item in draft.ended_rows] == [
        (ended, 4),
        (ends, 4),
    ]
    draft = StepDraft(2)
    draft.take_token(running(request(1, computed=1)))
    batch.fill_ended_rows(draft)
    assert [(item.request, item.first_position) for item in draft.ended_rows] == [(ended, 5)]


def test_all_blocks_come_back_when_the_batch_is_disbanded():
    batch = closed_batch("static")
    kv = batch._kv
    begin(batch, request(10, 3), request(4, 30))  # 40 slots: five blocks each
    assert kv.num_free_blocks == 16 - 2 * 5
    batch.disband()
    assert kv.num_free_blocks == 16
    kv.check_integrity()
