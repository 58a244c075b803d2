"""Who should not wait for the steps in flight runs before the rest of them."""

import pytest

from engine_loop import EngineLoop, small_config
from jaxengine.outputs import FinishReason
from known_times import KnownTimes

PROMPT = (3, 1, 4, 1, 5)


def flooded(*, num_streams=4, step_times=None, **changes) -> EngineLoop:
    """Four rows, all of one tenant, and a step of theirs that is not done when one looks."""
    loop = EngineLoop(small_config(**{"num_blocks": 41} | changes), step_times=step_times)
    for index in range(num_streams):
        loop.add(f"flood-{index}", (index, 7, 8), max_tokens=30, tenant="flood")
    for _ in range(3):
        loop.step()
    loop.runner.num_vain_looks = 99
    return loop


def test_a_newcomer_of_a_tenant_below_its_share_has_its_token_before_the_step_in_flight_ends():
    loop = flooded()
    in_flight = loop.runner.num_results
    (running,) = loop.core.steps_in_flight
    loop.add("light", PROMPT, tenant="light")
    assert loop.core.seconds_until_work() == 0.0
    (output,) = loop.step()
    assert (output.request_id, len(output.new_token_ids)) == ("light", 1)
    assert loop.runner.steps[-1] == [("light", len(PROMPT))]
    # Its own step was taken in, and the other is where it was.
    assert loop.runner.num_results == in_flight + 1
    assert loop.core.steps_in_flight == (running,)
    assert loop.stats.num_steps_overtaken == 1
    loop.runner.num_vain_looks = 0
    loop.run()
    loop.check_answers()
    loop.check_idle()


def test_all_that_come_while_a_step_runs_share_the_step_that_overtakes():
    loop = flooded(max_num_seqs=6, num_streams=6)
    for name in ("one", "two"):
        loop.add(name, PROMPT, tenant=name)
    loop.step()
    assert loop.runner.steps[-1] == [("one", 5), ("two", 5)]
    # Nobody foretells here how long a step takes, so it is delayed once.
    loop.add("three", PROMPT, tenant="three")
    loop.step()
    assert ("three", 5) in loop.runner.steps[-1]
    assert len(loop.runner.steps[-1]) > 1
    assert loop.stats.num_steps_overtaken == 1
    loop.runner.num_vain_looks = 0
    loop.run()
    loop.check_answers()


def test_two_steps_in_flight_are_both_overtaken():
    loop = flooded(step_times=KnownTimes())
    while len(loop.core.steps_in_flight) < 2:
        loop.core._in_flight.busy_since_s = loop.clock.now_s  # the clock of this loop is slow
        loop.core._in_flight[0].left_s = 100.0
        loop.step()
    before = loop.core.steps_in_flight
    loop.add("light", PROMPT, tenant="light")
    (output,) = loop.step()
    assert output.request_id == "light"
    assert loop.core.steps_in_flight == before
    loop.runner.num_vain_looks = 0
    loop.run()
    loop.check_answers()
    loop.check_idle()


@pytest.mark.parametrize(
    ("changes", "tenant", "prompt"),
    [
        pytest.param({}, "flood", PROMPT, id="its own tenant has all rows"),
        pytest.param({"scheduling_policy": "fcfs"}, "light", PROMPT, id="fcfs"),
        pytest.param({"scheduling_policy": "priority"}, "light", PROMPT, id="priority"),
        pytest.param({}, "light", tuple(range(17)), id="more than a step of 16 tokens"),
        pytest.param({"long_prefill_token_threshold": 4}, "light", PROMPT, id="cut to 4"),
        # Four requests hold one block each and write to it, and one more would be needed.
        pytest.param({"num_blocks": 9}, "light", PROMPT, id="no block that nobody else needs"),
        pytest.param({"max_num_seqs": 8}, "light", PROMPT, id="nobody beyond a fair share"),
    ],
)
def test_others_wait_for_the_next_step(changes, tenant, prompt):
    loop = flooded(**changes)
    loop.add("new", prompt, tenant=tenant)
    loop.step()
    assert loop.stats.num_steps_overtaken == 0
    loop.runner.num_vain_looks = 0
    loop.run()
    loop.check_answers()


@pytest.mark.parametrize(("target_ms", "overtakes"), [(30.0, False), (40.0, True)])
def test_streams_wait_no_longer_than_the_target_allows(target_ms, overtakes):
    # A step of four decodes takes 10 + 4 ms, and 0.1 ms for each of the four times 6 positions that
    # they attend to at most: 16.4. That of five tokens 15 ms and 1.5 for 15 pairs, 16.5.
    loop = flooded(step_times=KnownTimes(), target_itl_s=target_ms / 1000)
    loop.add("light", PROMPT, tenant="light")
    loop.step()
    assert loop.stats.num_steps_overtaken == overtakes


def test_a_step_that_is_done_is_taken_in_instead():
    loop = flooded()
    loop.runner.num_vain_looks = 0
    loop.add("light", PROMPT, tenant="light")
    outputs = loop.step()
    assert {output.request_id for output in outputs} == {f"flood-{i}" for i in range(4)}
    assert loop.stats.num_steps_overtaken == 0


def test_one_that_has_left_overtakes_nobody():
    loop = flooded()
    loop.add("light", PROMPT, tenant="light")
    loop.abort("light")
    loop.step()
    assert loop.stats.num_steps_overtaken == 0
    assert loop.ends["light"].finish_reason is FinishReason.ABORT


def test_the_blocks_of_who_left_are_nobodys_while_a_step_has_still_to_write_them():
    loop = flooded(num_blocks=13)  # twelve blocks, four of them held
    loop.abort("flood-0")
    loop.add("light", PROMPT, tenant="light")
    (running,) = loop.core.steps_in_flight
    loop.step()
    assert loop.runner.steps[-1] == [("light", 5)]
    assert not set(loop.requests["light"].block_ids) & running.written_blocks(8)


def test_the_record_of_an_overtaken_step_tells_how_long_others_ran():
    loop = flooded()
    loop.core.take_records()
    loop.add("light", PROMPT, tenant="light")
    loop.step()
    loop.runner.num_vain_looks = 0
    loop.step()
    first, second = loop.core.take_records()
    assert [share.request_id for share in first.shares] == ["light"]
    assert first.overtaken_s == 0.0
    assert second.overtaken_s == first.duration_s > 0
    assert second.device_start_s < first.device_start_s < first.end_s < second.end_s
    assert second.duration_s == second.end_s - second.device_start_s - first.duration_s


def test_steps_fail_together_with_the_one_that_overtakes_them():
    loop = flooded()
    loop.runner.fail_result(len(loop.runner.steps))
    loop.add("light", PROMPT, tenant="light")
    loop.step()
    assert loop.ends["light"].finish_reason is FinishReason.ERROR
    assert {loop.ends[f"flood-{i}"].finish_reason for i in range(4)} == {FinishReason.ERROR}
    loop.check_idle()


def long_prompt_beside_streams(**changes) -> EngineLoop:
    """Two streams that decode, and a prompt of 600 tokens beside them, in steps of 25 ms."""
    config = small_config(
        **{
            "num_blocks": 121,
            "max_model_len": 800,
            "max_num_batched_tokens": 64,
            "target_itl_s": 0.025,
        }
        | changes
    )
    # Two decodes take 12 ms, and hardly more for what they attend to.
    loop = EngineLoop(config, step_times=KnownTimes(position_s=1e-9))
    for name in "ab":
        loop.add(name, (5, 7, 8), max_tokens=150)
    for _ in range(3):
        loop.step()
    loop.add("long", tuple(range(40)) * 15, max_tokens=3)
    loop.runner.num_vain_looks = 2
    return loop


def test_streams_run_before_the_rest_of_a_long_piece_of_a_prompt():
    loop = long_prompt_beside_streams()
    loop.run()
    loop.check_answers()
    loop.check_idle()
    steps = [dict(step) for step in loop.runner.steps]
    beside = [step["long"] for step in steps if len(step) == 3]
    alone = [step["long"] for step in steps if list(step) == ["long"]]
    # Beside the streams there is time for 12 tokens, as long as no more than 32 x 12 = 384 lie
    # before: 33 times. Then 204 are left, of which a step takes 64, until 12 are left.
    assert beside == [12] * 34 + [1, 1]
    assert alone == [64] * 3
    assert loop.runner.num_overtaken == 3


@pytest.mark.parametrize(
    "changes",
    [{"target_itl_s": None}, {"num_speculative_tokens": 2}, {"overlap": False}],
    ids=["no target", "guessing", "no overlap"],
)
def test_prompts_are_computed_beside_streams_otherwise(changes):
    loop = long_prompt_beside_streams(**changes)
    loop.run()
    loop.check_answers()
    assert loop.runner.num_overtaken == 0


def test_streams_need_not_wait_for_a_long_piece_that_has_no_blocks_left_for_all_of_them():
    # 75 blocks for the prompt, one and then more for each stream: somebody has to be preempted.
    loop = long_prompt_beside_streams(num_blocks=79, max_model_len=620)
    loop.run()
    loop.check_answers()
    loop.check_idle()
    assert loop.stats.num_preemptions > 0
