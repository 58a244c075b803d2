"""Records of steps: what they add up to, and that none is missing."""

import itertools
import logging

import pytest

from engine_loop import EngineLoop, small_config
from jaxengine.step_log import StepRecord
from known_times import KnownTimes

loops = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
modes = pytest.mark.parametrize("batching", ["continuous", "dynamic", "static"])


@pytest.fixture(autouse=True)
def _expected_failures_are_not_printed(caplog):
    caplog.set_level(logging.CRITICAL + 1)


def busy_loop(**changes) -> EngineLoop:
    """Nine requests of two tenants in a cache that is too small for them."""
    config = small_config(**({"num_blocks": 9, "max_model_len": 40} | changes))
    loop = EngineLoop(config, num_padded_tokens=3, step_times=KnownTimes())
    for index in range(9):
        prompt = range(index, index + (20, 3, 9)[index % 3])
        loop.add(f"r{index}", prompt, tenant="ab"[index % 2], max_tokens=5 + index)
    return loop


def run(loop: EngineLoop) -> list[StepRecord]:
    records = []
    while loop.core.has_work:
        loop.step()
        records += loop.core.take_records()
    return records


@loops
@modes
def test_what_records_say_adds_up(overlap, batching):
    loop = busy_loop(overlap=overlap, batching=batching)
    records = run(loop)
    assert [record.index for record in records] == list(range(len(records)))
    assert len(records) == len(loop.runner.steps) == loop.stats.num_steps
    for record, step in zip(records, loop.runner.steps, strict=True):
        assert [(share.request_id, share.num_tokens) for share in record.shares] == step
        num_tokens = sum(share.num_tokens for share in record.shares)
        assert record.decode_tokens + record.prefill_tokens == num_tokens
        assert record.num_slots == num_tokens + record.wasted_slots
        assert record.num_decodes + record.num_prefills == len(record.shares)
        blocks = (record.num_used_blocks, record.num_cached_blocks, record.num_free_blocks)
        assert sum(blocks) == 8
        assert min(blocks) >= 0
        assert len(record.shares) <= record.num_running <= 4
        assert (record.waiting_for == "") == (record.num_waiting == 0)
    stats = loop.stats
    wasted = stats.padded_tokens + stats.wasted_prompt_slots + stats.wasted_row_slots
    assert sum(record.wasted_slots for record in records) == wasted
    assert sum(record.num_preempted for record in records) == stats.num_preemptions
    num_sampled = sum(share.samples for record in records for share in record.shares)
    assert num_sampled == stats.generation_tokens  # none of them ended before it was known
    assert sum(stats.step_times) == sum(stats.iteration_tokens) == stats.num_steps


@loops
def test_preemptions_are_in_the_records(overlap):
    loop = busy_loop(overlap=overlap)
    assert sum(record.num_preempted for record in run(loop)) > 0


@loops
def test_the_times_of_steps_do_not_overlap_and_are_those_that_the_device_was_busy(overlap):
    loop = busy_loop(overlap=overlap)
    records = run(loop)
    for record in records:
        assert record.scheduled_s < record.launched_s <= record.device_start_s < record.end_s
    for before, after in itertools.pairwise(records):
        assert after.device_start_s >= before.end_s
    assert sum(record.duration_s for record in records) == loop.stats.step_time_sum_s
    assert loop.stats.step_time_sum_s <= loop.stats.step_busy_s


def test_times_without_overlap_by_hand():
    loop = EngineLoop(small_config(overlap=False))
    loop.add("a", (1, 2, 3), max_tokens=2)
    times = [
        (record.scheduled_s, record.launched_s, record.device_start_s, record.end_s)
        for record in run(loop)
    ]
    assert times == [(1.0, 2.0, 2.0, 3.0), (4.0, 5.0, 5.0, 6.0)]


def test_times_with_overlap_by_hand():
    loop = EngineLoop(small_config(overlap=True))
    loop.add("a", (1, 2, 3), max_tokens=2)
    # Scheduled and launched at 1, 2, then 3, 4; the tokens of the first are here at 5. At 6 there
    # is nothing to launch, and the tokens of the second are here at 7.
    times = [
        (record.scheduled_s, record.launched_s, record.device_start_s, record.end_s)
        for record in run(loop)
    ]
    assert times == [(1.0, 2.0, 2.0, 5.0), (3.0, 4.0, 5.0, 7.0)]


@loops
def test_a_failed_step_has_no_record_and_leaves_no_gap(overlap):
    loop = busy_loop(overlap=overlap)
    loop.runner.fail_result(3)
    records = run(loop)
    assert [record.index for record in records] == list(range(len(records)))
    # With overlap, the step behind it is lost as well.
    assert len(records) == len(loop.runner.steps) - (2 if overlap else 1)
    for before, after in itertools.pairwise(records):
        assert after.device_start_s >= before.end_s


def test_a_prediction_is_made_when_a_step_is_launched():
    loop = EngineLoop(small_config(overlap=False), step_times=KnownTimes())
    loop.add("a", (1, 2, 3), max_tokens=2)
    # 10 ms, 3 tokens, 6 positions; 10 ms, 1 token, 4 positions.
    assert [record.predicted_s for record in run(loop)] == pytest.approx([0.0136, 0.0114])


def test_without_a_model_nothing_is_predicted():
    loop = EngineLoop(small_config())
    loop.add("a", (1, 2, 3), max_tokens=2)
    assert {record.predicted_s for record in run(loop)} == {None}
    assert loop.stats.num_predicted_steps == 0


def test_records_are_taken_once():
    loop = EngineLoop(small_config(overlap=False))
    loop.add("a", (1, 2, 3), max_tokens=2)
    loop.step()
    assert len(loop.core.take_records()) == 1
    assert loop.core.take_records() == []
