import asyncio

from jaxengine.step_log import StepLog, StepRecord


def record(index):
    return StepRecord(
        index=index,
        scheduled_s=1.0,
        launched_s=1.25,
        device_start_s=1.5,
        end_s=3.5,
        predicted_s=None,
        num_decodes=2,
        num_prefills=0,
        decode_tokens=2,
        prefill_tokens=0,
        draft_tokens=0,
        accepted_draft_tokens=0,
        num_slots=8,
        wasted_slots=6,
        num_preempted=0,
        num_running=2,
        num_waiting=0,
        waiting_for="",
        num_used_blocks=2,
        num_cached_blocks=0,
        num_free_blocks=8,
        shares=(),
    )


def indices(records):
    return [record.index for record in records]


async def test_a_reader_gets_what_came_after_the_last_that_it_saw():
    log = StepLog(10)
    assert (log.last_index, log.after(-1)) == (-1, ())
    log.extend([record(0), record(1), record(2)])
    assert log.last_index == 2
    assert indices(log.after(-1)) == [0, 1, 2]
    assert indices(log.after(0)) == [1, 2]
    assert log.after(2) == ()
    assert log.after(7) == ()


async def test_only_the_newest_are_kept():
    log = StepLog(2)
    log.extend(record(index) for index in range(5))
    assert indices(log.after(-1)) == [3, 4]
    assert indices(log.after(3)) == [4]


async def test_a_reader_waits_for_the_next_step():
    log = StepLog(10)
    log.extend([record(0)])
    assert indices(await log.wait_after(-1)) == [0]
    waiting = asyncio.ensure_future(log.wait_after(0))
    await asyncio.sleep(0)
    assert not waiting.done()
    log.extend([record(1)])
    assert indices(await waiting) == [1]


def test_the_time_on_the_device_begins_when_it_could():
    assert record(0).duration_s == 2.0
