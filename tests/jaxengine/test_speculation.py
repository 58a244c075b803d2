import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_loop import EngineLoop, small_config
from fake_runner import repetitive
from known_times import KnownTimes
from scheduler_loop import SchedulerLoop

# 1 2 has been followed by 3 4 1 2. With one guess that came true, the next has a chance of
# 0.5 + 0.1 * (0.98 - 0.5) = 0.548, the two next 0.548 ** 2 = 0.30, and three 0.16: too little.
PROMPT = (1, 2, 3, 4, 1, 2)


class Guessing(SchedulerLoop):
    """Lets a test say what is sampled after each item of a step."""

    def __init__(self, **changes):
        super().__init__(**({"num_speculative_tokens": 4} | changes))

    def take_in(self, output, *sampled):
        self.now_s += 1
        outputs = self.scheduler.update(output, sampled, self.now_s)
        self.scheduler.check_integrity()
        return outputs

    def with_drafts(self, **wishes):
        """A request that has 3 as its first token; return it and the step that guesses."""
        request = self.add("a", PROMPT, **wishes)
        self.take_in(self.schedule(), 3)
        return request, self.schedule()

    @property
    def counts(self):
        return self.scheduler.speculation.num_drafted, self.scheduler.speculation.num_accepted


def guesses(output):
    """For each item its request, position and, of drafts, the guessed token."""
    return [(i.request.request_id, i.first_position, i.draft_id) for i in output.scheduled]


def test_guesses_are_further_tokens_of_the_step():
    request, step = Guessing().with_drafts()
    assert guesses(step) == [("a", 6, None), ("a", 7, 4), ("a", 8, 1)]
    # Rows are 0 to 3; 4 is for what is not sampled, 5 for what is sampled and not remembered.
    assert [item.row for item in step.scheduled] == [request.row, 5, 5]
    assert [list(item.token_ids) for item in step.scheduled] == [[3], [4], [1]]
    assert (step.num_tokens, step.work.num_seqs, step.work.decode_only) == (3, 3, True)
    assert step.work.decode_context == 7 + 8 + 9
    assert (request.num_computed_tokens, request.num_pending_tokens) == (7, 1)


@pytest.mark.parametrize(
    ("sampled", "new", "num_accepted"),
    [
        ((4, 1, 9), (4, 1, 9), 2),
        ((4, 9, 2), (4, 9), 1),
        ((9, 1, 2), (9,), 0),  # what follows a wrong guess is of no use, even if it looks right
    ],
)
def test_tokens_count_up_to_the_first_that_was_guessed_wrongly(sampled, new, num_accepted):
    loop = Guessing()
    request, step = loop.with_drafts()
    [output] = loop.take_in(step, *sampled)
    assert output.new_token_ids == new
    assert request.token_ids == [*PROMPT, 3, *new]
    assert request.num_computed_tokens == 7 + num_accepted == request.num_tokens - 1
    assert loop.counts == (2, num_accepted)
    assert loop.scheduler.generation_tokens == 1 + len(new)
    # The next step goes on right behind.
    assert guesses(loop.schedule())[0] == ("a", 7 + num_accepted, None)


def test_without_the_wish_nobody_guesses():
    _, step = Guessing(num_speculative_tokens=0).with_drafts()
    assert guesses(step) == [("a", 6, None)]


def test_a_stop_token_among_the_guesses_ends_the_request():
    loop = Guessing()
    _, step = loop.with_drafts(stop_token_ids=(4,))
    [output] = loop.take_in(step, 4, 1, 9)
    assert (output.new_token_ids, output.stop_token_id) == ((4,), 4)
    assert loop.counts == (2, 0)
    loop = Guessing()
    _, step = loop.with_drafts(stop_token_ids=(1,))
    [output] = loop.take_in(step, 4, 1, 9)
    assert (output.new_token_ids, output.stop_token_id) == ((4, 1), 1)
    assert loop.kv.num_free_blocks == loop.kv.num_blocks


@pytest.mark.parametrize(("max_tokens", "num_guesses"), [(2, 0), (3, 1), (4, 2), (5, 2)])
def test_no_more_is_guessed_than_may_come(max_tokens, num_guesses):
    # After the first token, a step gives one besides the guessed ones.
    _, step = Guessing().with_drafts(max_tokens=max_tokens)
    assert len(step.scheduled) == 1 + num_guesses


@pytest.mark.parametrize(
    "wish",
    [
        {"logprobs": 1},
        {"prompt_logprobs": 1},
        {"presence_penalty": 0.5},
        {"logit_bias": ((7, 1.0),)},
        {"allowed_token_ids": tuple(range(100))},
    ],
)
def test_who_wants_more_than_tokens_does_not_guess(wish):
    _, step = Guessing().with_drafts(**wish)
    assert guesses(step) == [("a", 6, None)]


def test_guesses_keep_the_budget_of_tokens():
    loop = Guessing(max_num_scheduled_tokens=6)
    loop.with_drafts()
    loop = Guessing(max_num_scheduled_tokens=2)
    loop.add("a", PROMPT)
    for _ in range(3):  # the prompt, two tokens at a time
        step = loop.schedule()
        loop.take_in(step, 3)
    assert guesses(loop.schedule()) == [("a", 6, None), ("a", 7, 4)]


def test_guesses_of_all_fit_into_the_largest_compiled_step():
    loop = Guessing(max_num_seqs=4, max_num_batched_tokens=64)  # compiled for 8
    for name in "abcd":
        loop.add(name, PROMPT, salt=name)
    loop.take_in(loop.schedule(), 3, 3, 3, 3)
    step = loop.schedule()
    # Eight were likely enough; the likelier ones are taken.
    assert [(item.request.request_id, item.draft_id) for item in step.scheduled] == [
        *(("a", None), ("b", None), ("c", None), ("d", None)),
        *(("a", 4), ("b", 4), ("c", 4), ("d", 4)),
    ]


def test_guesses_take_no_block_that_others_will_want():
    # Seven of eight places are taken, so there is room for one guess; the other blocks are few.
    loop = Guessing(num_blocks=4, max_model_len=24, watermark=2)
    loop.add("a", PROMPT)
    loop.take_in(loop.schedule(), 3)
    assert guesses(loop.schedule()) == [("a", 6, None), ("a", 7, 4)]
    assert loop.kv.num_free_blocks == 2


def test_where_a_step_takes_longer_than_guesses_save_nobody_guesses():
    class Dear(KnownTimes):
        def predict(self, work):
            return 0.010 * work.num_tokens

    # Two guesses cost three times a step, and bring 1.85 tokens.
    _, step = Guessing(step_times=Dear()).with_drafts()
    assert len(step.scheduled) == 1
    # By KnownTimes they cost 13 ms instead of 11.
    _, step = Guessing(step_times=KnownTimes(0.0)).with_drafts()
    assert len(step.scheduled) == 3


def test_guesses_do_not_break_the_pace_that_was_promised():
    _, step = Guessing(step_times=KnownTimes(0.0), target_itl_s=0.012).with_drafts()
    assert len(step.scheduled) == 1


def test_a_request_with_guesses_in_flight_sits_out_and_delays_nobody():
    loop = Guessing()
    request = loop.add("a", PROMPT)
    other = loop.add("b", (7, 8, 9))
    loop.take_in(loop.schedule(), 3, 5)
    step = loop.schedule()
    assert guesses(step) == [("a", 6, None), ("b", 3, None), ("a", 7, 4), ("a", 8, 1)]
    meanwhile = loop.schedule()
    assert guesses(meanwhile) == [("b", 4, None)]
    outputs = loop.take_in(step, 4, 6, 1, 9)
    assert [(o.request_id, o.new_token_ids) for o in outputs] == [("a", (4, 1, 9)), ("b", (6,))]
    assert request.token_ids[-3:] == [4, 1, 9]
    assert other.num_pending_tokens == 1
    assert guesses(loop.schedule())[0] == ("a", 9, None)


def test_a_request_that_would_guess_waits_for_its_last_token_if_nobody_needs_the_step():
    loop = Guessing()
    request = loop.add("a", PROMPT)
    step = loop.schedule()  # the prompt; its token is on its way
    # If it is 3 (chance 0.5), two more guesses may follow: 0.25 and, too unlikely, 0.125.
    assert loop.schedule().scheduled == ()
    assert request.num_pending_tokens == 1
    loop.take_in(step, 3)
    assert guesses(loop.schedule()) == [("a", 6, None), ("a", 7, 4), ("a", 8, 1)]


def test_it_does_not_wait_if_others_take_the_step_and_it_would_lose():
    loop = Guessing()
    loop.add("a", PROMPT)
    loop.add("b", (7, 8, 9))
    loop.schedule()
    # 0.25 of a further token is less than the token that this step gives.
    assert guesses(loop.schedule()) == [("a", 6, None), ("b", 3, None)]


def test_it_waits_also_beside_others_once_it_is_sure():
    loop = Guessing()
    request = loop.add("a", (1, 2, 3, 4) * 3)
    loop.add("b", (7, 8, 9))
    tokens = [1, 2, 3, 4] * 20
    waited = 0
    pending = loop.schedule()
    for _ in range(12):
        following = loop.schedule()
        waited += all(item.request is not request for item in following.scheduled)
        loop.take_in(
            pending,
            *(
                # "b" never repeats itself.
                100 + int(loop.now_s)
                if item.request is not request
                else tokens[item.first_position + item.num_new_tokens]
                for item in pending.scheduled
            ),
        )
        pending = following
    assert waited > 2
    assert request.token_ids == tokens[: len(request.token_ids)]
    assert loop.counts[0] == loop.counts[1] > 4


def test_who_is_left_in_flight_gets_nothing_more():
    loop = Guessing()
    request, step = loop.with_drafts()
    loop.abort("a")
    assert loop.take_in(step, 4, 1, 9) == []
    assert request.token_ids == [*PROMPT, 3]
    assert loop.kv.num_free_blocks == loop.kv.num_blocks


def test_who_is_preempted_in_flight_keeps_its_tokens_and_nothing_computed():
    loop = Guessing(max_num_seqs=1, scheduling_policy="priority")
    request, step = loop.with_drafts()
    loop.kv.free(request)  # what a lack of blocks does to it
    request.num_computed_tokens = 0
    loop.take_in(step, 4, 1, 9)
    assert request.token_ids == [*PROMPT, 3, 4, 1, 9]
    assert request.num_computed_tokens == 0


def test_after_a_failed_step_it_starts_over_without_guesses():
    loop = Guessing()
    request, _ = loop.with_drafts()
    loop.scheduler.fail([], "", loop.now_s)
    loop.scheduler.check_integrity()
    assert (request.num_draft_tokens, request.num_pending_tokens) == (0, 0)
    step = loop.schedule()
    assert guesses(step) == [("a", 0, None)]
    assert step.scheduled[0].num_new_tokens == 7


def test_the_prefix_cache_remembers_what_was_accepted_and_no_more():
    loop = Guessing()
    request, step = loop.with_drafts()
    loop.take_in(step, 4, 9, 2)  # 4 fills the first block; the guess behind it was wrong
    assert request.token_ids == [*PROMPT, 3, 4, 9]
    loop.abort("a")
    again = loop.add("b", (*PROMPT, 3, 4, 9))
    loop.schedule()
    assert again.num_cached_tokens == 8


def test_a_token_that_was_sampled_but_not_computed_fills_no_cached_block():
    loop = Guessing()
    _, step = loop.with_drafts()
    loop.take_in(step, 9, 1, 2)  # 9 is at the last place of the first block
    loop.abort("a")
    again = loop.add("b", (*PROMPT, 3, 9, 5))
    loop.schedule()
    assert again.num_cached_tokens == 0


def test_accepted_tokens_are_charged_to_the_tenant_and_rejected_ones_not():
    services = {}
    for sampled in ((4, 1, 9), (9, 1, 2)):
        loop = Guessing()
        request, step = loop.with_drafts()
        before = request.account.service
        loop.take_in(step, *sampled)
        services[sampled] = request.account.service - before
    plain = Guessing(num_speculative_tokens=0)
    request, _ = plain.with_drafts()
    before = request.account.service
    plain.take_in(plain.schedule(), 4)
    one = request.account.service - before
    assert services == {(4, 1, 9): pytest.approx(2 * one), (9, 1, 2): 0}


@st.composite
def requests(draw):
    return {
        "prompt": tuple(draw(st.lists(st.integers(0, 22), min_size=1, max_size=12))),
        "max_tokens": draw(st.integers(1, 30)),
        "stop_token_ids": draw(st.sampled_from(((), (), (3,)))),
        "min_tokens": draw(st.sampled_from((0, 0, 1))),
    }


@given(
    batch=st.lists(requests(), min_size=1, max_size=5),
    num_guessed=st.integers(1, 9),
    overlap=st.booleans(),
    caching=st.booleans(),
    num_blocks=st.sampled_from((7, 9, 40)),
    times=st.sampled_from((None, KnownTimes())),
)
@settings(max_examples=60)
def test_answers_are_those_without_guesses(batch, num_guessed, overlap, caching, num_blocks, times):
    loop = EngineLoop(
        small_config(
            num_speculative_tokens=num_guessed,
            overlap=overlap,
            enable_prefix_caching=caching,
            num_blocks=num_blocks,
            max_model_len=48,
        ),
        vocab_size=23,
        step_times=times,
        next_token=repetitive(23),
    )
    for index, request in enumerate(batch):
        loop.add(f"r{index}", **request)
    loop.run()
    loop.check_answers()
    loop.check_idle()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_text_that_repeats_takes_fewer_steps(overlap):
    counts = {}
    for most in (0, 4):
        loop = EngineLoop(
            small_config(overlap=overlap, num_speculative_tokens=most), next_token=repetitive(100)
        )
        loop.add("a", (1, 2, 3, 4, 5) * 2, max_tokens=40)
        loop.run()
        loop.check_answers()
        counts[most] = len(loop.runner.steps)
        records = loop.core.take_records()
        stats = loop.stats
        assert sum(record.draft_tokens for record in records) == stats.draft_tokens
        accepted = sum(record.accepted_draft_tokens for record in records)
        assert accepted == stats.accepted_draft_tokens
        # Each step that samples gives one token, and one more for each guess that was right.
        assert len(records) + accepted == 40
    assert counts[0] == 40
    assert counts[4] < 25
