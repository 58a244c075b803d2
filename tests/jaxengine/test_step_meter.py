import pytest

from jaxengine.request import Request
from jaxengine.sampling_params import SamplingParams
from jaxengine.scheduler_output import ScheduledRequest
from jaxengine.step_log import StepShare
from jaxengine.step_meter import LaunchedStep, StepMeter
from steps import step_of


def share(name: str, first: int, count: int, *, samples: bool = True) -> ScheduledRequest:
    request = Request(name, (1,) * 50, SamplingParams(max_tokens=9), seed=0, arrival_time_s=0.0)
    return ScheduledRequest(
        request,
        first_position=first,
        num_new_tokens=count,
        row=0,
        block_ids=[1],
        samples=samples,
        last_is_pending=False,
    )


def launched(*items: ScheduledRequest, at_s: float, num_slots: int = 16, **fields) -> LaunchedStep:
    names = ("num_running", "num_waiting", "predicted_s")
    own = {name: fields.pop(name) for name in names if name in fields}
    return LaunchedStep(
        output=step_of(*items, **fields),
        scheduled_s=at_s - 0.5,
        launched_s=at_s,
        num_slots=num_slots,
        num_used_blocks=3,
        num_cached_blocks=4,
        num_free_blocks=5,
        **({"predicted_s": None, "num_running": 2, "num_waiting": 1} | own),
    )


def test_a_record_says_what_the_step_did():
    step = launched(
        share("a", 30, 1),
        share("b", 0, 6, samples=False),
        share("c", 10, 1, samples=False),
        at_s=10.0,
        num_slots=16,
        padding=(share("d", 0, 3, samples=False),),
        ended_rows=(share("e", 9, 1, samples=False),),
        num_preempted=2,
        waiting_for="seqs",
        predicted_s=0.25,
    )
    record = StepMeter().finish(step, 10.5)
    assert (record.index, record.scheduled_s, record.launched_s) == (0, 9.5, 10.0)
    assert (record.device_start_s, record.end_s, record.duration_s) == (10.0, 10.5, 0.5)
    assert (record.num_decodes, record.decode_tokens) == (2, 2)
    assert (record.num_prefills, record.prefill_tokens) == (1, 6)
    # 8 of 16 slots hold tokens.
    assert (record.num_slots, record.wasted_slots) == (16, 8)
    assert (record.num_preempted, record.waiting_for, record.predicted_s) == (2, "seqs", 0.25)
    assert (record.num_running, record.num_waiting) == (2, 1)
    assert (record.num_used_blocks, record.num_cached_blocks, record.num_free_blocks) == (3, 4, 5)
    assert record.shares == (
        StepShare("a", 30, 1, True),
        StepShare("b", 0, 6, False),
        StepShare("c", 10, 1, False),
    )


def test_slots_add_up_by_cause():
    meter = StepMeter()
    meter.finish(launched(share("a", 0, 5), at_s=1.0, num_slots=8), 2.0)
    meter.finish(
        launched(
            share("a", 0, 5),
            at_s=3.0,
            num_slots=16,
            padding=(share("b", 0, 4),),
            ended_rows=(share("c", 9, 1), share("d", 9, 1)),
        ),
        4.0,
    )
    assert (meter.wasted_prompt_slots, meter.wasted_row_slots) == (4, 2)
    assert meter.padded_tokens == (8 - 5) + (16 - 5 - 4 - 2)
    assert meter.iteration_tokens_sum == 10


def test_a_step_launched_behind_another_begins_when_that_one_ends():
    meter = StepMeter()
    first, second = launched(at_s=1.0), launched(at_s=2.0)
    third = launched(at_s=9.0)
    records = [meter.finish(first, 4.0), meter.finish(second, 6.0), meter.finish(third, 10.0)]
    assert [record.device_start_s for record in records] == [1.0, 4.0, 9.0]
    assert [record.duration_s for record in records] == [3.0, 2.0, 1.0]
    assert [record.index for record in records] == [0, 1, 2]
    assert meter.step_time_sum_s == 6.0


def test_steps_are_counted_by_their_time_and_their_tokens():
    meter = StepMeter()
    # 0.98 and 1.46 ms, which are exact in binary, and what is as long as the last bucket allows.
    for index, time_s in enumerate((2**-10, 1.5 * 2**-10, 0.25, 5.0, 6.0)):
        start_s = 16.0 * index
        meter.finish(launched(share("a", 0, 3), at_s=start_s), start_s + time_s)
    # The buckets end at 1 ms, 2 ms, ..., 0.2 s, 0.3 s, ..., 2 s, 5 s.
    assert [count and index for index, count in enumerate(meter.step_times)] == [
        *(0, 1, *[0] * 12, 14),
        *(0, 0, 0, 0, 19, 20),
    ]
    assert meter.step_times[0] == 1
    assert meter.iteration_tokens[2] == 5  # more than 2 and up to 4


def test_the_error_of_predictions_is_counted_only_where_there_was_one():
    meter = StepMeter()
    meter.finish(launched(at_s=1.0, predicted_s=0.75), 2.0)
    meter.finish(launched(at_s=3.0, predicted_s=1.5), 4.0)
    meter.finish(launched(at_s=5.0), 6.0)
    assert meter.num_predicted_steps == 2
    assert meter.step_prediction_error_s == pytest.approx(0.25 + 0.5)
