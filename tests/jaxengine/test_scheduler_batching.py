"""Static and dynamic batching: who starts together, what is padded, what is computed for nothing.

The loop's clock takes a second for each look: steps are scheduled at odd seconds.
"""

from collections.abc import Sequence

import pytest

from engine_loop import EngineLoop, small_config
from jaxengine.batching import STATIC_PATIENCE_S
from jaxengine.engine_core import STEP_FAILED
from jaxengine.outputs import FinishReason
from jaxengine.scheduler_output import ScheduledRequest
from scheduler_loop import SchedulerLoop, shares

modes = pytest.mark.parametrize("batching", ["static", "dynamic"])


def batch_loop(batching: str = "static", **changes) -> SchedulerLoop:
    return SchedulerLoop(**({"batching": batching, "batch_window_s": 3.0} | changes))


def step(loop: SchedulerLoop, tokens=None) -> tuple[dict[str, int], int, int]:
    """Step; return the shares, the slots of padding, and the number of ended rows."""
    output = loop.schedule()
    loop.update(output, tokens)
    return shares(output), output.padding_slots, len(output.ended_rows)


def places(fillers: Sequence[ScheduledRequest]) -> list[tuple[str, int, int]]:
    """Of each filler: whose row it is in, its first position, and how many slots it takes."""
    return [(f.request.request_id, f.first_position, f.num_new_tokens) for f in fillers]


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
    assert loop.scheduler.roster.num_preemptions == 0


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


@modes
def test_every_row_may_get_as_long_as_the_longest_prompt_and_answer_together(batching):
    loop = batch_loop(batching, num_blocks=9, max_num_seqs=4, max_num_batched_tokens=64)
    loop.add("a", 20, max_tokens=1)
    loop.add("b", 1, max_tokens=10)
    loop.add("c", 1, max_tokens=1)
    # a has 21 tokens and b 11, but rows of 20 + 10 slots take 4 of 8 blocks each.
    loop.now_s = 9.0
    assert loop.step() == {"a": 20, "b": 1}
    assert loop.kv.num_free_blocks == 0
    while loop.scheduler.num_running:
        assert loop.kv.num_free_blocks == 0
        loop.step()
    assert (loop.kv.num_free_blocks, loop.scheduler.num_waiting) == (8, 1)


@modes
def test_a_batch_is_no_longer_than_the_context(batching):
    loop = batch_loop(batching, max_model_len=24, max_num_batched_tokens=64)
    loop.add("a", 20, max_tokens=4)
    loop.add("b", 4, max_tokens=4)
    loop.add("c", 4, max_tokens=20)  # 20 + 20 would be too long
    loop.now_s = 9.0
    assert loop.step() == {"a": 20, "b": 4}


# What is wasted.


def test_prompts_are_padded_and_computed_before_anybody_decodes():
    loop = batch_loop("static", max_num_seqs=3)
    for name, length in (("a", 20), ("b", 4), ("c", 1)):
        loop.add(name, length, max_tokens=3)
    # 3 x 20 slots, at most 16 and 3 sequences a step: 35 hold padding, 25 hold tokens.
    seen = [loop.schedule() for _ in range(5)]
    assert [shares(output) for output in seen[:2]] == [{"a": 16}, {"a": 4, "b": 4, "c": 1}]
    assert [places(output.padding) for output in seen] == [
        [],
        [],
        [("b", 4, 16)],
        [("c", 1, 16)],
        [("c", 17, 3)],
    ]
    assert all(not output.ended_rows for output in seen)
    for output in seen:
        loop.update(output)
    assert step(loop) == ({"a": 1, "b": 1, "c": 1}, 0, 0)


def test_padding_is_computed_behind_the_prompt_in_the_blocks_of_its_row():
    loop = batch_loop("static", max_num_seqs=2, max_num_batched_tokens=64)
    loop.add("a", 20, max_tokens=3)
    short = loop.add("b", 4, max_tokens=3)
    loop.schedule()
    [padding] = loop.schedule().padding
    assert (padding.first_position, padding.num_new_tokens) == (4, 16)
    assert padding.block_ids is short.block_ids
    assert len(padding.block_ids) == 3
    assert list(padding.token_ids) == [0] * 16
    assert not padding.samples


def test_prompts_that_are_alike_are_not_padded():
    loop = batch_loop("static", max_num_seqs=3)
    for name in "abc":
        loop.add(name, 5, max_tokens=3)
    assert step(loop) == ({"a": 5, "b": 5, "c": 5}, 0, 0)


def test_a_cached_beginning_is_not_computed_and_counts_for_the_length():
    loop = batch_loop("static", max_num_seqs=2, max_num_batched_tokens=32)
    loop.add("a", range(9), max_tokens=1)
    loop.add("b", range(30, 39), max_tokens=1)
    loop.step()
    loop.add("c", [*range(8), 50, 51], max_tokens=2)
    loop.add("d", range(60, 72), max_tokens=2)
    # c computes the 2 tokens that a had not; its 10 are padded to the 12 of d.
    assert step(loop) == ({"c": 2, "d": 12}, 0, 0)
    assert step(loop) == ({}, 2, 0)


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


def test_an_ended_row_goes_on_over_a_context_that_grows():
    loop = batch_loop("static", max_num_seqs=2, max_num_batched_tokens=64)
    short = loop.add("a", 4, max_tokens=3)
    loop.add("b", 4, max_tokens=9)
    blocks = []
    seen = []
    for _ in range(9):
        output = loop.schedule()
        blocks.append(loop.kv.num_free_blocks)
        seen += places(output.ended_rows)
        assert all(item.block_ids is short.block_ids for item in output.ended_rows)
        loop.update(output)
    # a has 7 tokens, of which the last one, at position 6, was never computed. From there on.
    assert seen == [("a", position, 1) for position in range(6, 12)]
    # Rows of 4 + 9 slots, two blocks each, are kept until b ends.
    assert blocks == [12] * 9
    assert loop.kv.num_free_blocks == 16


def test_an_ended_row_goes_on_behind_its_padding():
    loop = batch_loop("static", max_num_seqs=2, max_num_batched_tokens=64)
    loop.add("a", 4, max_tokens=3)
    loop.add("b", 12, max_tokens=5)
    seen = [loop.schedule()]
    while loop.scheduler.has_requests:
        loop.update(seen[-1])
        seen.append(loop.schedule())
    assert [places(output.padding) for output in seen[:2]] == [[], [("a", 4, 8)]]
    assert [places(output.ended_rows) for output in seen[4:6]] == [[("a", 12, 1)], [("a", 13, 1)]]


def test_rows_that_wait_for_the_token_budget_have_not_ended():
    loop = batch_loop("static", max_num_scheduled_tokens=3)
    for name in "abcd":
        loop.add(name, 1, max_tokens=3)
    seen = [step(loop) for _ in range(6)]
    # While a, b and c decode, d waits for its turn; then three rows have ended, and two fit. They
    # end where all rows do: at one token of a prompt and three of an answer.
    assert [(sum(given.values()), ended) for given, _, ended in seen] == [
        *((3, 0), (1, 0), (3, 0), (3, 0)),
        *((1, 2), (1, 1)),
    ]


def test_the_row_of_one_whose_last_token_is_in_flight_is_computed_for_nothing():
    loop = batch_loop("static", max_num_seqs=2)
    loop.add("a", 4, max_tokens=1)
    loop.add("b", 4, max_tokens=3)
    first = loop.schedule()
    second = loop.schedule()  # launched before the tokens of the first are here
    assert (shares(second), len(second.ended_rows)) == ({"b": 1}, 1)
    loop.update(first)
    third = loop.schedule()
    assert (shares(third), len(third.ended_rows)) == ({"b": 1}, 1)
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
def test_what_an_abort_left_of_a_prompt_is_computed_all_the_same(batching):
    loop = batch_loop(batching, max_num_seqs=2)
    loop.add("a", 20, max_tokens=2)
    loop.add("b", 30, max_tokens=2)
    assert step(loop) == ({"a": 16}, 0, 0)
    loop.abort("a")
    assert loop.kv.num_free_blocks == 16 - 2 * 4
    # a's row is filled to the 30 of b, and then goes on beside b.
    seen = [loop.schedule() for _ in range(4)]
    assert [shares(output) for output in seen] == [{"b": 16}, {"b": 14}, {}, {"b": 1}]
    assert [places(output.padding) for output in seen[1:3]] == [[("a", 16, 2)], [("a", 18, 12)]]
    assert places(seen[3].ended_rows) == [("a", 30, 1)]
    loop.abort("b")
    assert loop.kv.num_free_blocks == 16


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
    assert step(loop) == ({"a": 10, "b": 4}, 0, 0)
    assert step(loop) == ({}, 6, 0)
    loop.scheduler.fail([], "it broke", 9.0)
    loop.scheduler.check_integrity()
    assert loop.kv.num_free_blocks == 16
    assert step(loop) == ({"a": 11, "b": 5}, 0, 0)  # and the token that each had
    assert step(loop) == ({}, 6, 0)


@modes
def test_an_ended_row_gives_its_blocks_back_when_its_batch_fails(batching):
    loop = batch_loop(batching, max_num_seqs=3, max_num_batched_tokens=32)
    for name, max_tokens in (("a", 1), ("b", 5), ("c", 5)):
        loop.add(name, 10, max_tokens=max_tokens)
    output = loop.schedule()
    loop.update(output)
    [end] = loop.scheduler.fail([output.scheduled[1].request], "it broke", 9.0)
    assert (end.request_id, loop.scheduler.num_waiting) == ("b", 1)
    assert loop.kv.num_free_blocks == 16
    loop.scheduler.check_integrity()


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
