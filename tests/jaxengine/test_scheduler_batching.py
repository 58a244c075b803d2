"""Static and dynamic batching: who starts together, what is padded, what is computed for nothing.

The loop's clock takes a second for each look: steps are scheduled at odd seconds.
"""

import pytest

from engine_loop import EngineLoop, small_config
from jaxengine.batching import STATIC_PATIENCE_S
from jaxengine.engine_core import STEP_FAILED
from jaxengine.outputs import FinishReason
from scheduler_loop import SchedulerLoop, shares

modes = pytest.mark.parametrize("batching", ["static", "dynamic"])


def batch_loop(batching: str = "static", **changes) -> SchedulerLoop:
    return SchedulerLoop(**({"batching": batching, "batch_window_s": 3.0} | changes))


def step(loop: SchedulerLoop, tokens=None) -> tuple[dict[str, int], int, int]:
    """Step; return the shares, the slots of padding, and those of ended rows."""
    output = loop.schedule()
    loop.update(output, tokens)
    return shares(output), output.padding_slots, output.ended_row_slots


# When a batch starts.


@modes
def test_a_full_batch_starts_at_once(batching):
    loop = batch_loop(batching, max_num_seqs=2)
    loop.add("a", 4)
    loop.add("b", 4)
    assert loop.step() == {"a": 4, "b": 4}


def test_a_dynamic_batch_starts_when_its_window_is_over():
    loop = batch_loop("dynamic")
    loop.add("a", 4)  # at 0
    output = loop.schedule()  # at 1
    assert (output.is_empty, output.waiting_for) == (True, "batch")
    loop.now_s = 1.5
    loop.add("b", 4)
    assert loop.schedule().is_empty  # at 2.5
    loop.now_s = 2.0
    assert loop.step() == {"a": 4, "b": 4}  # at 3


def test_the_window_counts_from_the_first_arrival_whoever_goes_first():
    loop = batch_loop("dynamic")
    loop.add("low", 4, priority=1)  # at 0
    loop.now_s = 2.0
    loop.add("urgent", 4)
    assert loop.scheduler.next_event_s(2.0) == 3.0
    assert loop.step() == {"urgent": 4, "low": 4}


def test_a_static_batch_starts_when_nobody_new_has_come_for_long():
    loop = batch_loop("static")
    loop.add("a", 4)
    loop.now_s = 2.0
    loop.add("b", 4)
    assert loop.scheduler.next_event_s(2.0) == 2.0 + STATIC_PATIENCE_S
    loop.now_s = STATIC_PATIENCE_S
    assert loop.schedule().is_empty
    assert loop.step() == {"a": 4, "b": 4}


@modes
def test_nobody_joins_until_all_have_ended(batching):
    loop = batch_loop(batching, max_num_seqs=2)
    loop.add("a", 4, max_tokens=1)
    loop.add("b", 4, max_tokens=4)
    loop.add("c", 4, max_tokens=1)
    loop.add("d", 4, max_tokens=1)
    # a has ended after the first step: its row is free, and computed for nothing.
    assert step(loop) == ({"a": 4, "b": 4}, 0, 0)
    for _ in range(3):
        assert loop.scheduler.num_waiting == 2
        assert step(loop) == ({"b": 1}, 0, 1)
    assert step(loop) == ({"c": 4, "d": 4}, 0, 0)
    assert not loop.scheduler.has_requests


def test_what_is_left_when_a_batch_ends_starts_after_its_own_window():
    loop = batch_loop("dynamic", max_num_seqs=2)
    for name in "abc":
        loop.add(name, 4, max_tokens=2)
    loop.step()
    loop.step()
    loop.now_s = 20.0
    loop.add("d", 4, max_tokens=2)
    assert loop.step() == {"c": 4, "d": 4}  # full; and the window of c was over long ago


@modes
def test_a_batch_takes_as_many_as_the_cache_holds_at_their_longest(batching):
    loop = batch_loop(batching, num_blocks=9, max_num_seqs=4, max_num_batched_tokens=64)
    for name in "abcd":
        loop.add(name, 10, max_tokens=14)  # 24 tokens: 3 of 8 blocks
    assert loop.step() == {"a": 10, "b": 10}
    assert loop.kv.num_free_blocks == 2
    while "c" not in (given := loop.step()):
        assert set(given) == {"a", "b"}
    assert given == {"c": 10, "d": 10}
    assert loop.scheduler.num_preemptions == 0


@modes
def test_no_batch_is_preempted_or_displaced_however_small_the_cache(batching):
    loop = EngineLoop(
        small_config(batching=batching, batch_window_s=3.0, num_blocks=9, overlap=False)
    )
    for index in range(9):
        loop.add(
            f"r{index}",
            range(index, index + 12),
            max_tokens=12 + index,
            tenant="ab"[index == 8],
            priority=-index,
        )
    loop.run()
    assert loop.stats.num_preemptions == 0
    loop.check_answers()
    loop.check_idle()


# What is wasted.


def test_prompts_are_padded_and_computed_before_anybody_decodes():
    loop = batch_loop("static", max_num_seqs=3)
    for name, length in (("a", 20), ("b", 4), ("c", 1)):
        loop.add(name, length, max_tokens=3)
    # 20 + 20 + 20 slots, 16 a step: 35 hold padding, 25 hold tokens.
    steps = [step(loop) for _ in range(4)]
    assert sum(padding for _, padding, _ in steps) == 16 + 19
    assert [sum(given.values()) + padding for given, padding, _ in steps] == [16, 16, 16, 11]
    assert [ended for _, _, ended in steps] == [0, 0, 0, 0]
    totals = {name: sum(given.get(name, 0) for given, _, _ in steps) for name in "ab"}
    assert totals == {"a": 20, "b": 4}
    # The last token of a prompt counts as a decode, since it is one token.
    assert step(loop) == ({"a": 1, "b": 1, "c": 1}, 0, 0)


def test_prompts_that_are_alike_are_not_padded():
    loop = batch_loop("static", max_num_seqs=3)
    for name in "abc":
        loop.add(name, 5, max_tokens=3)
    assert step(loop) == ({"a": 5, "b": 5, "c": 5}, 0, 0)


def test_a_cached_beginning_is_not_padded():
    loop = batch_loop("static", max_num_seqs=2, max_num_batched_tokens=32)
    loop.add("a", range(9), max_tokens=1)
    loop.add("b", range(30, 39), max_tokens=1)
    loop.step()
    loop.add("c", [*range(8), 50, 51], max_tokens=1)
    loop.add("d", range(60, 72), max_tokens=1)
    # c computes the 2 tokens that a had not, and is padded to the 12 of d.
    assert step(loop) == ({"c": 2, "d": 12}, 10, 0)


def test_each_step_computes_the_rows_of_those_who_have_ended():
    loop = batch_loop("static")
    for name, max_tokens in (("a", 2), ("b", 3), ("c", 5), ("d", 5)):
        loop.add(name, 4, max_tokens=max_tokens)
    steps = [step(loop) for _ in range(5)]
    assert [(len(given), ended) for given, _, ended in steps] == [
        (4, 0),
        (4, 0),
        (3, 1),
        (2, 2),
        (2, 2),
    ]
    assert not loop.scheduler.has_requests


def test_rows_that_wait_for_the_token_budget_have_not_ended():
    loop = batch_loop("static", max_num_scheduled_tokens=3)
    for name in "abcd":
        loop.add(name, 1, max_tokens=3)
    seen = [step(loop) for _ in range(6)]
    # While a, b and c decode, d waits for its turn; then three rows have ended, and two fit.
    assert [(sum(given.values()), ended) for given, _, ended in seen] == [(3, 0)] * 3 + [(1, 2)] * 3


def test_the_row_of_one_whose_last_token_is_in_flight_is_computed_for_nothing():
    loop = batch_loop("static", max_num_seqs=2)
    loop.add("a", 4, max_tokens=1)
    loop.add("b", 4, max_tokens=3)
    first = loop.schedule()
    second = loop.schedule()  # launched before the tokens of the first are here
    assert (shares(second), second.ended_row_slots) == ({"b": 1}, 1)
    loop.update(first)
    third = loop.schedule()
    assert (shares(third), third.ended_row_slots) == ({"b": 1}, 1)
    loop.update(second)
    assert loop.schedule().is_empty  # b's last token is in flight: nobody needs a row
    loop.update(third)
    assert not loop.scheduler.has_requests


# Aborts, limits and failures.


@modes
def test_an_abort_leaves_its_row_to_be_computed_for_nothing(batching):
    loop = batch_loop(batching, max_num_seqs=2)
    loop.add("a", 4, max_tokens=5)
    loop.add("b", 4, max_tokens=5)
    loop.add("c", 4, max_tokens=5)
    loop.step()
    loop.abort("a")
    assert step(loop) == ({"b": 1}, 0, 1)
    assert loop.scheduler.num_waiting == 1
    loop.abort("b")
    loop.now_s = 50.0
    assert step(loop) == ({"c": 4}, 0, 0)


@modes
def test_a_batch_left_by_all_makes_room_for_the_next(batching):
    loop = batch_loop(batching, max_num_seqs=2)
    loop.add("a", 30)
    loop.add("b", 3)
    loop.step()
    loop.abort("a")
    loop.abort("b")
    loop.add("c", 4, max_tokens=1)
    loop.add("d", 4, max_tokens=1)
    assert step(loop) == ({"c": 4, "d": 4}, 0, 0)


@modes
def test_a_request_that_waits_for_its_batch_can_expire(batching):
    loop = batch_loop(batching, batch_window_s=20.0)
    loop.add("a", 4, queue_timeout_s=2.0)
    assert loop.scheduler.next_event_s(0.0) == 2.0
    [end] = loop.expire(2.0)
    assert end.finish_reason is FinishReason.QUEUE_TIMEOUT
    assert loop.scheduler.next_event_s(2.0) is None


@modes
@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_step_ends_its_requests_and_the_others_go_on(batching, overlap):
    config = small_config(batching=batching, batch_window_s=3.0, max_num_seqs=2, overlap=overlap)
    loop = EngineLoop(config)
    loop.runner.fail_launch(1)
    for index in range(5):
        loop.add(f"r{index}", range(index, index + 7), max_tokens=4)
    loop.run()
    errors = {name for name, end in loop.ends.items() if end.error == STEP_FAILED}
    assert errors == {"r0", "r1"}
    loop.check_answers()
    loop.check_idle()


def test_a_batch_that_has_to_start_over_is_padded_anew():
    loop = batch_loop("static", max_num_seqs=2, max_num_batched_tokens=32)
    loop.add("a", 10, max_tokens=5)
    loop.add("b", 4, max_tokens=5)
    assert step(loop) == ({"a": 10, "b": 4}, 6, 0)
    loop.scheduler.fail([], "it broke", 9.0)
    loop.scheduler.check_integrity()
    assert step(loop) == ({"a": 11, "b": 5}, 6, 0)  # and the token that each had


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("scheduled", [64, 16, 3])
def test_the_answers_are_those_of_continuous_batching(overlap, scheduled):
    answers = []
    for batching in ("continuous", "dynamic", "static"):
        loop = EngineLoop(
            small_config(
                batching=batching,
                overlap=overlap,
                num_blocks=25,
                max_num_batched_tokens=64,
                max_num_scheduled_tokens=scheduled,
            )
        )
        for index in range(11):
            length = (1, 8, 30, 17, 5)[index % 5]
            prompt = range(index, index + length)
            loop.add(f"r{index}", prompt, max_tokens=1 + 5 * (index % 4), tenant="ab"[index % 2])
            loop.step()
        loop.run()
        loop.check_answers()
        loop.check_idle()
        answers.append(loop.answers)
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_engine_counts_what_was_wasted(overlap):
    loop = EngineLoop(small_config(batching="static", max_num_seqs=2, overlap=overlap))
    loop.add("a", range(10), max_tokens=1)
    loop.add("b", range(50, 54), max_tokens=4)
    loop.run()
    stats = loop.stats
    # 20 slots in two steps, 6 of them padding; then three tokens of b beside the row of a.
    assert (stats.wasted_prompt_slots, stats.wasted_row_slots, stats.padded_tokens) == (6, 3, 0)
    assert (stats.num_steps, stats.iteration_tokens_sum) == (5, 17)
