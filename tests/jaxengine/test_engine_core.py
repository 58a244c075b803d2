import logging

import pytest

from engine_loop import EngineLoop, small_config
from jaxengine.engine_core import MAX_FAILURES_IN_A_ROW, STEP_FAILED
from jaxengine.errors import EngineDeadError
from jaxengine.outputs import FinishReason
from jaxengine.step_time import StepWork
from known_times import KnownTimes

PLAIN = small_config(overlap=False)
OVERLAPPED = small_config(overlap=True)
both_loops = pytest.mark.parametrize("config", [PLAIN, OVERLAPPED], ids=["plain", "overlapped"])


@both_loops
def test_a_request_gets_the_tokens_that_are_computed_by_hand(config):
    loop = EngineLoop(config)
    loop.add("a", (1, 2, 3), max_tokens=3)
    loop.run()
    assert loop.answers == {"a": (14, 70, 20)}
    assert loop.ends["a"].finish_reason is FinishReason.LENGTH
    loop.check_idle()


def test_without_overlap_a_step_gives_its_own_tokens():
    loop = EngineLoop(PLAIN)
    loop.add("a", (1, 2, 3), max_tokens=2)
    assert [output.new_token_ids for output in loop.step()] == [(14,)]
    assert [output.new_token_ids for output in loop.step()] == [(70,)]
    assert not loop.core.has_work


def test_with_overlap_a_step_gives_the_tokens_of_the_one_before():
    loop = EngineLoop(OVERLAPPED)
    loop.add("a", (1, 2, 3), max_tokens=2)
    assert loop.step() == []
    assert [output.new_token_ids for output in loop.step()] == [(14,)]
    assert [output.new_token_ids for output in loop.step()] == [(70,)]
    assert not loop.core.has_work
    assert loop.runner.steps == [[("a", 3)], [("a", 1)]]


def test_with_overlap_the_step_after_the_end_is_launched_and_its_token_dropped():
    loop = EngineLoop(OVERLAPPED, eos=(14,))
    loop.add("a", (1, 2, 3))
    loop.step()
    [last] = loop.step()
    assert (last.new_token_ids, last.finish_reason) == ((14,), FinishReason.STOP)
    assert loop.core.has_work  # the surplus step
    assert loop.step() == []
    assert not loop.core.has_work
    assert loop.runner.steps == [[("a", 3)], [("a", 1)]]
    assert loop.stats.generation_tokens == 1


class SlowSteps(KnownTimes):
    """Steps of 100 seconds, for the clock of an EngineLoop, which counts looks at it."""

    def predict(self, work: StepWork) -> float:
        return 100.0


def test_with_overlap_the_next_step_waits_until_the_running_one_is_half_over():
    loop = EngineLoop(OVERLAPPED, step_times=SlowSteps())
    loop.add("a", (1, 2, 3), max_tokens=3)
    loop.step()  # looks at the clock at 1, when it begins, and at 2
    assert loop.core.seconds_until_work() == pytest.approx(1 + 50 - 3)
    loop.clock.now_s = 60
    assert loop.core.seconds_until_work() == 0
    loop.add("b", (3, 2, 1), max_tokens=1)
    loop.step()
    assert loop.runner.steps == [[("a", 3)], [("a", 1), ("b", 3)]]


def test_a_step_that_nobody_can_predict_is_not_waited_for():
    loop = EngineLoop(OVERLAPPED)
    loop.add("a", (1, 2, 3), max_tokens=3)
    loop.step()
    assert loop.core.seconds_until_work() == 0


def test_launches_that_find_the_device_idle_come_earlier():
    loop = EngineLoop(OVERLAPPED, step_times=SlowSteps())
    loop.add("a", (1, 2, 3), max_tokens=20)
    waits = []
    for _ in range(5):  # the fake device is always done at once
        loop.step()
        waits.append(loop.core.seconds_until_work())
    assert waits == sorted(waits, reverse=True)
    assert waits[-1] < waits[0] - 4 * 1.5


@both_loops
def test_stepping_an_idle_engine_does_nothing(config):
    loop = EngineLoop(config)
    assert loop.step() == []
    assert loop.stats.num_steps == 0


@both_loops
def test_a_place_freed_by_an_end_can_be_taken_while_its_surplus_token_is_in_flight(config):
    config = small_config(overlap=config.overlap, max_num_seqs=1, num_blocks=2, max_model_len=8)
    loop = EngineLoop(config, eos=(14,))
    loop.add("a", (1, 2, 3), max_tokens=5)
    loop.add("b", (3, 2, 1), max_tokens=5)  # 3 + 4 + 3 = 10, + 40 = 50, + 250 = 300: 0, ...
    loop.run()
    assert loop.answers == {"a": (14,), "b": (10, 50, 0, 0, 0)}


@both_loops
def test_an_answer_is_cached_for_the_next_turn(config):
    loop = EngineLoop(config)
    loop.add("a", range(10), max_tokens=8)
    loop.run()
    # 10 + 7 tokens were computed; the last one sampled was not.
    loop.add("b", [*range(10), *loop.answers["a"], 1], max_tokens=1)
    loop.run()
    assert loop.ends["b"].num_cached_tokens == 16
    loop.check_answers()


@both_loops
def test_preemption_does_not_change_an_answer(config):
    config = small_config(overlap=config.overlap, num_blocks=6, max_model_len=40)
    loop = EngineLoop(config)
    for index in range(4):
        loop.add(f"r{index}", range(index, index + 15), max_tokens=25)
    loop.run()
    assert loop.stats.num_preemptions > 0
    loop.check_answers()
    loop.check_idle()


# Aborts.


@both_loops
@pytest.mark.parametrize("num_steps", range(5))
def test_an_abort_frees_all_blocks_at_once(config, num_steps):
    loop = EngineLoop(config)
    loop.add("a", range(36))  # three chunks
    for _ in range(num_steps):
        loop.step()
    loop.abort("a")
    assert loop.ends["a"].finish_reason is FinishReason.ABORT
    loop.check_idle()
    assert loop.step() == []
    assert not loop.core.has_work
    loop.abort("a")
    loop.abort("unknown")
    assert list(loop.ends) == ["a"]


@both_loops
@pytest.mark.parametrize("num_steps", range(1, 5))
def test_a_turn_that_was_left_does_not_spoil_the_next_one(config, num_steps):
    loop = EngineLoop(config)
    loop.add("left", range(36))
    for _ in range(num_steps):
        loop.step()
    loop.abort("left")
    loop.add("next", range(40))  # at once, while a step of the other is in flight
    loop.run()
    assert loop.ends["next"].num_cached_tokens == min(num_steps * 16, 32)
    loop.check_answers()


def test_abort_all_ends_everybody_once():
    loop = EngineLoop(OVERLAPPED)
    for name in "abcdef":
        loop.add(name, range(5))
    loop.step()
    outputs = loop.core.abort_all()
    assert [o.request_id for o in outputs] == list("abcdef")
    assert {o.finish_reason for o in outputs} == {FinishReason.ABORT}
    assert loop.core.abort_all() == []
    loop.check_idle()


# Failed steps.


@pytest.fixture(autouse=True)
def _expected_failures_are_not_printed(caplog):
    caplog.set_level(logging.CRITICAL + 1)


@both_loops
@pytest.mark.parametrize("kind", ["launch", "result"])
def test_a_failed_step_fails_its_requests_and_no_others(config, kind):
    loop = EngineLoop(small_config(overlap=config.overlap, max_num_seqs=2))
    for name in "abc":
        loop.add(name, (1, 2, 3), max_tokens=3)
    getattr(loop.runner, f"fail_{kind}")(1)
    loop.run()
    for name in "ab":
        end = loop.ends[name]
        assert (end.finish_reason, end.error) == (FinishReason.ERROR, STEP_FAILED)
        assert loop.answers[name] in ((), (14,))
    assert loop.answers["c"] == (14, 70, 20)
    assert loop.ends["c"].finish_reason is FinishReason.LENGTH
    assert loop.runner.num_resets == 1
    assert loop.stats.num_step_failures == 1
    loop.check_idle()


def test_a_step_launched_behind_a_failing_one_fails_with_it():
    loop = EngineLoop(OVERLAPPED)
    loop.runner.fail_result(0)
    loop.add("a", range(16))
    loop.step()  # a fills the step
    loop.add("b", (1, 2, 3))
    loop.add("c", range(20))
    outputs = loop.step()  # launches a and b and a part of c, then hears of the failure
    assert {output.request_id for output in outputs} == {"a", "b", "c"}
    assert {output.finish_reason for output in outputs} == {FinishReason.ERROR}
    assert not loop.core.has_work
    loop.check_idle()


@both_loops
def test_a_request_that_gave_way_before_the_failure_goes_on_after_it(config):
    loop = EngineLoop(small_config(overlap=config.overlap, num_blocks=6, max_model_len=40))
    loop.add("a", range(15), max_tokens=20)
    b = loop.add("b", range(1, 16), max_tokens=20)
    while not b.num_preemptions:
        loop.step()
    loop.step()  # takes in what was in flight when b gave way
    num_tokens = len(loop.answers["b"])
    assert num_tokens > 0
    loop.runner.fail_launch(len(loop.runner.steps))
    loop.run()
    assert loop.runner.lost == {"a"}
    assert loop.ends["a"].finish_reason is FinishReason.ERROR
    assert len(loop.answers["b"]) == 20
    loop.check_answers()


def test_a_failure_in_taking_in_keeps_the_tokens_that_came_before_it():
    loop = EngineLoop(OVERLAPPED)
    loop.add("a", (1, 2, 3), max_tokens=2)
    loop.runner.fail_result(1)
    loop.step()
    loop.step()  # takes in 14
    outputs = loop.step()
    assert [(o.new_token_ids, o.finish_reason) for o in outputs] == [((), FinishReason.ERROR)]
    assert loop.answers == {"a": (14,)}


@both_loops
def test_after_a_failure_nothing_is_taken_from_the_old_cache(config):
    loop = EngineLoop(config)
    loop.add("a", range(20), max_tokens=1)
    loop.run()
    assert loop.stats.num_cached_blocks == 2
    loop.runner.fail_launch(len(loop.runner.steps))
    loop.add("b", (1, 2, 3), max_tokens=1)
    loop.run()
    assert loop.stats.num_cached_blocks == 0
    loop.add("c", range(20), max_tokens=1)
    loop.run()
    assert loop.ends["c"].num_cached_tokens == 0
    loop.check_answers()


@both_loops
@pytest.mark.parametrize("kind", ["launch", "result"])
def test_an_engine_that_only_fails_is_dead(config, kind):
    loop = EngineLoop(config)
    for step in range(2 * MAX_FAILURES_IN_A_ROW):
        getattr(loop.runner, f"fail_{kind}")(step)
    for index in range(9):
        loop.add(f"r{index}", range(16))
    with pytest.raises(EngineDeadError, match="3 steps failed in a row, the last with Runtime"):
        loop.run()
    assert loop.stats.num_step_failures == 3
    assert len(loop.runner.lost) >= 2


@both_loops
def test_failures_with_a_good_step_between_them_do_not_kill_the_engine(config):
    loop = EngineLoop(config)
    for index in range(10):
        loop.runner.fail_launch(len(loop.runner.steps))
        loop.add(f"bad{index}", (1, 2, 3), max_tokens=1)
        loop.run()
        loop.add(f"good{index}", (1, 2, 3), max_tokens=1)
        loop.run()
        assert loop.answers[f"bad{index}"] == ()
        assert loop.answers[f"good{index}"] == (14,)
    assert loop.stats.num_step_failures == 10


def test_a_failure_is_logged_with_its_cause(caplog):
    caplog.set_level(logging.ERROR)
    loop = EngineLoop(PLAIN)
    loop.add("a", (1, 2, 3))
    loop.runner.fail_launch(0)
    loop.run()
    [record] = caplog.records
    assert record.message == "a step failed"
    assert "the device has failed" in caplog.text


# Statistics.


def test_busy_time_without_overlap_is_from_launch_to_tokens():
    loop = EngineLoop(PLAIN)
    loop.add("a", (1, 2, 3), max_tokens=3)
    loop.run()
    # Three steps, each with a look at the clock before it is scheduled, one when it is launched,
    # and one when the tokens are here: two seconds from the first to the last.
    assert loop.stats.step_busy_s == 6.0


def test_busy_time_with_overlap_counts_no_second_twice():
    loop = EngineLoop(OVERLAPPED)
    loop.add("a", (1, 2, 3), max_tokens=3)
    loop.run()
    # Scheduled at 1, 3, 6 and launched a second later; tokens at 5, 8; at 9 there is nothing to
    # launch; tokens at 10. In all, something was in flight from 1 to 10.
    assert loop.stats.step_busy_s == 9.0


def test_without_overlap_the_device_is_idle_from_tokens_to_the_next_launch():
    loop = EngineLoop(PLAIN)
    loop.add("a", (1, 2, 3), max_tokens=3)
    loop.run()
    # Tokens at 3 and 6, and the next step launched two seconds later.
    assert loop.stats.device_idle_s == 4.0


def test_with_overlap_it_is_idle_since_the_step_should_have_been_done():
    loop = EngineLoop(OVERLAPPED, step_times=KnownTimes())
    loop.add("a", (1, 2, 3), max_tokens=3)
    loop.run()
    # Launched at 2 and 4, predicted are 10 + 3 + 6 / 10 ms; from 5, when its tokens were there, to
    # 7, 10 + 1 + 4 / 10. The fake device is always done.
    assert loop.stats.device_idle_s == pytest.approx(2 - 0.0136 + 2 - 0.0114)


def test_a_device_that_is_given_its_next_step_in_time_is_not_idle():
    loop = EngineLoop(OVERLAPPED, step_times=KnownTimes())
    loop.runner.num_vain_looks = 2
    loop.add("a", (1, 2, 3), max_tokens=3)
    loop.run()
    assert loop.stats.device_idle_s == 0.0


def test_time_without_requests_is_not_idle():
    loop = EngineLoop(PLAIN)
    for name in "ab":
        loop.add(name, (1, 2, 3), max_tokens=2)
        loop.step()
        loop.core.abort(name)
        loop.core.abort("nobody")  # looks at the clock
    assert loop.stats.device_idle_s == 0.0


def test_time_between_requests_is_not_busy():
    loop = EngineLoop(PLAIN)
    for name in "ab":
        loop.add(name, (1, 2, 3), max_tokens=1)
        loop.run()
        loop.core.abort("nobody")  # looks at the clock
        loop.core.abort("nobody")
    assert loop.stats.step_busy_s == 4.0


def test_the_time_of_a_failed_step_is_busy_time():
    loop = EngineLoop(PLAIN)
    loop.runner.fail_result(0)
    loop.add("a", (1, 2, 3), max_tokens=1)
    loop.run()
    assert loop.stats.step_busy_s == 2.0


def test_steps_are_counted_by_their_tokens():
    loop = EngineLoop(PLAIN, num_padded_tokens=5)
    loop.add("a", range(19), max_tokens=3)  # steps of 16, 3, 1 and 1 tokens
    loop.run()
    stats = loop.stats
    # The buckets end at 1, 2, 4, 8, 16, ...
    assert stats.iteration_tokens == (2, 0, 1, 0, 1, *[0] * 11)
    assert stats.iteration_tokens_sum == 21
    assert stats.num_steps == 4
    assert stats.padded_tokens == 20


def test_a_step_beyond_the_last_bucket_has_a_place():
    config = small_config(
        num_blocks=2100, max_model_len=16386, max_num_batched_tokens=16385, overlap=False
    )
    loop = EngineLoop(config)
    loop.add("a", [0] * 16385, max_tokens=1)
    loop.step()
    assert loop.stats.iteration_tokens == (*[0] * 15, 1)


def test_tokens_and_lookups_are_counted():
    loop = EngineLoop(OVERLAPPED)
    loop.add("a", range(20), max_tokens=3)
    loop.run()
    loop.add("b", range(20), max_tokens=2)
    loop.run()
    stats = loop.stats
    assert (stats.prompt_tokens, stats.generation_tokens) == (40, 5)
    assert (stats.prefix_queries, stats.prefix_hits) == (40, 16)
    assert (stats.num_blocks, stats.block_size, stats.num_cached_blocks) == (16, 8, 2)
    assert stats.compiles_after_ready == 0


def test_running_and_waiting_are_counted():
    loop = EngineLoop(small_config(max_num_seqs=2))
    for name in "abc":
        loop.add(name, range(5))
    assert (loop.stats.num_running, loop.stats.num_waiting) == (0, 3)
    loop.step()
    assert (loop.stats.num_running, loop.stats.num_waiting) == (2, 1)
    assert loop.stats.num_free_blocks == 14
    assert loop.stats.kv_cache_usage == 0.125
