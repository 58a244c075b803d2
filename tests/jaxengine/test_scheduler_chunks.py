"""How prompts are cut: by the token budget, the threshold, and the time that a step may take."""

import pytest

from engine_loop import EngineLoop, small_config
from jaxengine.step_time import StepWork
from known_times import KnownTimes
from scheduler_loop import SchedulerLoop, shares


def timed_loop(target_ms: float, *, law: KnownTimes | None = None, **changes) -> SchedulerLoop:
    return SchedulerLoop(
        step_times=law or KnownTimes(),
        target_itl_s=target_ms / 1000,
        **({"num_blocks": 65, "max_model_len": 256, "max_num_batched_tokens": 64} | changes),
    )


# The threshold.


def test_alone_a_long_prompt_takes_all_there_is():
    loop = SchedulerLoop(long_prefill_token_threshold=4)
    loop.add("a", 20)
    assert [loop.step(), loop.step()] == [{"a": 16}, {"a": 4}]


def test_among_others_a_long_prompt_takes_the_threshold():
    loop = SchedulerLoop(long_prefill_token_threshold=4)
    loop.add("a", 20)
    loop.add("b", 6)
    loop.add("c", 2)
    assert loop.step() == {"a": 4, "b": 4, "c": 2}
    assert loop.step() == {"a": 4, "b": 2, "c": 1}
    loop.abort("b")
    loop.abort("c")
    assert loop.step() == {"a": 12}


def test_who_waits_counts_as_another():
    loop = SchedulerLoop(long_prefill_token_threshold=4, max_num_seqs=1)
    loop.add("a", 20)
    loop.add("b", 6)
    assert loop.step() == {"a": 4}


def test_the_threshold_does_not_slow_what_a_preemption_lost_more_than_a_prompt():
    loop = SchedulerLoop(
        long_prefill_token_threshold=4, num_blocks=6, max_model_len=40, enable_prefix_caching=False
    )
    loop.add("a", 8)
    b = loop.add("b", 20)
    for _ in range(20):
        loop.step()
        assert b.num_computed_tokens <= b.num_tokens
    assert b.num_output_tokens > 0


# Blocks for the whole prompt.


def test_the_blocks_of_the_whole_prompt_are_reserved_when_it_starts():
    loop = SchedulerLoop()
    request = loop.add("a", 60)
    assert loop.step() == {"a": 16}
    assert len(request.block_ids) == 8
    assert loop.kv.num_free_blocks == 8


# The time of a step.


def test_without_streams_a_prompt_is_not_cut_by_time():
    loop = timed_loop(20)
    loop.add("a", 60)
    assert loop.step() == {"a": 60}


def test_a_prompt_is_cut_so_that_streams_get_their_tokens_in_time():
    loop = timed_loop(50)
    loop.add("a", 9)
    loop.step()
    loop.add("b", 100)
    # 10 ms + 1 token of 1 ms + 1 ms for its 10 positions: 38 ms are left. n tokens from position 0
    # on take n + n (n + 1) / 20 ms: 19 take 38.0.
    assert loop.step() == {"a": 1, "b": 19}
    # 11 positions: 37.9 ms are left. From 19 on n tokens take n + (19 n + n (n + 1) / 2) / 10:
    # 11 take 38.5, 10 take 34.5.
    assert loop.step() == {"a": 1, "b": 10}


def test_a_cut_is_given_up_once_the_streams_have_ended():
    loop = timed_loop(50)
    loop.add("a", 9, max_tokens=2)
    loop.step()
    loop.add("b", 83)
    assert loop.step() == {"a": 1, "b": 19}
    assert loop.step() == {"b": 64}


def test_prompts_move_on_a_block_at_a_time_even_if_streams_take_all_the_time_there_is():
    loop = timed_loop(11)
    loop.add("a", 9)
    loop.step()
    loop.add("b", 20)
    assert [loop.step() for _ in range(3)] == [
        {"a": 1, "b": 8},
        {"a": 1, "b": 8},
        {"a": 1, "b": 4},
    ]


def test_when_there_is_no_time_only_one_prompt_moves_on():
    loop = timed_loop(11)
    loop.add("a", 9)
    loop.step()
    loop.add("b", 20)
    loop.add("c", 20)
    output = loop.schedule()
    assert shares(output) == {"a": 1, "b": 8}
    assert output.waiting_for == "tokens"


def test_several_prompts_share_the_time_that_is_left():
    loop = timed_loop(50)
    loop.add("a", 9)
    loop.step()
    loop.add("b", 8)
    loop.add("c", 40)
    # 38 ms are left; 8 tokens of b take 8 + 3.6; 26.4 are left: 14 of c take 14 + 10.5 = 24.5,
    # and 15 would take 27.
    assert loop.step() == {"a": 1, "b": 8, "c": 14}


def test_no_step_with_streams_takes_longer_than_the_target_if_a_block_fits():
    law = KnownTimes(position_s=0.00001)
    loop = timed_loop(60, law=law)
    for name in "abc":
        loop.add(name, 5, max_tokens=200)
    loop.step()
    long = loop.add("long", 200, max_tokens=1)
    times = []
    while long.num_computed_tokens < 200:
        output = loop.schedule()
        times.append(law.predict(output.work))
        loop.update(output)
    assert max(times) <= 0.060
    # The streams take 3 ms and less than 1 ms for what they attend to, so 46 ms are left; a token
    # takes 3 ms at most: at least 15 in a step.
    assert len(times) <= 14


def test_the_token_budget_still_holds():
    loop = timed_loop(1000, max_num_scheduled_tokens=16)
    loop.add("a", 9)
    loop.step()
    loop.add("b", 100)
    assert loop.step() == {"a": 1, "b": 15}


def test_without_a_target_times_do_not_matter():
    loop = SchedulerLoop(step_times=KnownTimes(), max_num_batched_tokens=64)
    loop.add("a", 9)
    loop.step()
    loop.add("b", 60)
    assert loop.step() == {"a": 1, "b": 60}


def test_the_engine_teaches_the_model_what_steps_took_and_says_how_wrong_it_was():
    law = KnownTimes()
    loop = EngineLoop(small_config(overlap=False), step_times=law)
    loop.add("a", (1, 2, 3), max_tokens=2, temperature=0.0)
    loop.run()
    # Launched one look at the clock before the tokens are here: a second.
    assert law.observed == [
        (StepWork(3, 1, False, 0, 6, 0, 3), 1.0),
        (StepWork(1, 1, True, 4, 0, 0, 0), 1.0),
    ]
    predicted = [law.predict(work) for work, _ in law.observed]
    assert predicted == pytest.approx([0.0136, 0.0114])
    assert loop.stats.num_predicted_steps == 2
    assert loop.stats.step_prediction_error_s == pytest.approx(2 - 0.025)


# What the first waiting request is said to wait for.


def test_nobody_waits():
    loop = SchedulerLoop()
    loop.add("a", 4)
    assert loop.schedule().waiting_for == ""


def test_nobody_waits_although_time_is_up():
    loop = timed_loop(11)
    loop.add("a", 9)
    loop.step()
    loop.add("b", 20)
    loop.step()
    assert loop.schedule().waiting_for == ""


def test_for_a_row():
    loop = SchedulerLoop(max_num_seqs=1)
    loop.add("a", 4)
    loop.add("b", 4)
    assert loop.schedule().waiting_for == "seqs"


def test_for_blocks_also_if_nothing_has_changed_since_the_step_before():
    loop = SchedulerLoop(num_blocks=9)
    loop.add("a", 10)
    loop.step()
    loop.add("b", 56)
    for _ in range(3):
        output = loop.schedule()
        assert output.waiting_for == "kv_cache"
        loop.update(output)


def test_for_tokens():
    loop = SchedulerLoop()
    loop.add("a", 20)
    loop.add("b", 4)
    assert loop.schedule().waiting_for == "tokens"


def test_for_blocks_if_some_had_to_be_taken_from_others():
    loop = SchedulerLoop(num_blocks=6, max_num_batched_tokens=64, max_model_len=40)
    loop.add("a", 16)
    loop.add("b", 16)
    loop.step()
    output = loop.schedule()
    assert output.num_preempted == 1
    assert output.waiting_for == "kv_cache"


def test_for_its_token_in_flight():
    loop = SchedulerLoop(num_blocks=6, max_num_batched_tokens=64, max_model_len=40)
    loop.add("a", 16)
    loop.add("b", 16)
    loop.schedule()
    loop.schedule()
    loop.abort("a")
    assert loop.schedule().waiting_for == "preemption"


def test_for_the_batch():
    loop = SchedulerLoop(batching="static", max_num_seqs=1)
    loop.add("a", 4)
    loop.add("b", 4)
    assert loop.schedule().waiting_for == "batch"
