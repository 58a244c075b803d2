"""Deadlines and queue timeouts: who is ended, when, and that nothing is left of it."""

import pytest

from jaxengine.outputs import FinishReason
from jaxengine.request import RequestStatus
from scheduler_loop import SchedulerLoop


def ends(outputs) -> list[tuple[str, FinishReason | None]]:
    return [(output.request_id, output.finish_reason) for output in outputs]


def test_a_request_that_waits_too_long_ends():
    loop = SchedulerLoop(max_num_seqs=1)
    loop.add("a", 4)
    loop.add("b", 4, queue_timeout_s=5.0)
    loop.step()  # a at 1 and 2
    assert loop.expire(4.9) == []
    [end] = loop.expire(5.0)
    assert (end.request_id, end.finish_reason) == ("b", FinishReason.QUEUE_TIMEOUT)
    assert (end.queue_s, end.new_token_ids) == (5.0, ())
    assert end.timing is not None
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (1, 0)
    assert loop.expire(100.0) == []


def test_a_queue_timeout_no_longer_matters_once_the_request_has_started():
    loop = SchedulerLoop()
    loop.add("a", 40, queue_timeout_s=5.0)
    loop.step()  # the first chunk
    assert loop.expire(1000.0) == []


def test_a_request_that_started_and_gave_way_has_no_queue_timeout_any_more():
    loop = SchedulerLoop(num_blocks=6, max_model_len=40, max_num_batched_tokens=64)
    loop.add("a", 16)
    b = loop.add("b", 16, queue_timeout_s=5.0)
    loop.step()
    loop.step()
    assert b.status is RequestStatus.PREEMPTED
    assert loop.expire(1000.0) == []


@pytest.mark.parametrize("num_steps", range(5))
def test_a_deadline_ends_a_request_wherever_it_is(num_steps):
    loop = SchedulerLoop()
    loop.add("a", 36, deadline_s=50.0)  # three chunks
    for _ in range(num_steps):
        loop.step()
    assert ends(loop.expire(50.0)) == [("a", FinishReason.DEADLINE)]
    assert not loop.scheduler.has_requests
    assert loop.kv.num_free_blocks == loop.kv.num_blocks
    assert loop.step() == {}
    assert loop.abort("a") is None
    assert loop.expire(60.0) == []


def test_a_deadline_with_a_token_in_flight_drops_that_token():
    loop = SchedulerLoop()
    loop.add("a", 4, deadline_s=50.0)
    in_flight = loop.schedule()
    assert ends(loop.expire(50.0)) == [("a", FinishReason.DEADLINE)]
    assert loop.kv.num_free_blocks == loop.kv.num_blocks
    assert loop.update(in_flight) == []
    assert loop.scheduler.generation_tokens == 0


def test_what_was_said_before_the_deadline_stays_said():
    loop = SchedulerLoop()
    request = loop.add("a", 4, deadline_s=50.0)
    assert len(loop.update(loop.schedule(), {"a": 30})) == 1
    assert len(loop.update(loop.schedule(), {"a": 31})) == 1
    [end] = loop.expire(50.0)
    assert (end.new_token_ids, request.token_ids[4:]) == ((), [30, 31])


def test_a_deadline_ends_a_preempted_request_whose_token_is_in_flight():
    loop = SchedulerLoop(num_blocks=6, max_model_len=40, max_num_batched_tokens=64)
    loop.add("a", 16)
    b = loop.add("b", 16, deadline_s=50.0)
    first, second = loop.schedule(), loop.schedule()
    assert (b.status, b.num_pending_tokens) == (RequestStatus.PREEMPTED, 1)
    assert ends(loop.expire(50.0)) == [("b", FinishReason.DEADLINE)]
    assert [o.request_id for o in loop.update(first)] == ["a"]
    assert [o.request_id for o in loop.update(second)] == ["a"]
    assert loop.scheduler.roster.num_preempted == 0


def test_a_request_whose_both_limits_passed_unnoticed_ends_once():
    loop = SchedulerLoop(max_num_seqs=1)
    loop.add("a", 4)
    loop.add("b", 4, queue_timeout_s=3.0, deadline_s=4.0)
    loop.add("c", 4, queue_timeout_s=3.0, deadline_s=2.0)
    assert ends(loop.expire(9.0)) == [
        ("c", FinishReason.DEADLINE),
        ("b", FinishReason.QUEUE_TIMEOUT),
    ]
    assert loop.scheduler.num_waiting == 1


def test_a_failure_does_not_move_a_deadline():
    loop = SchedulerLoop()
    loop.add("a", 4, deadline_s=50.0)
    loop.step()
    loop.scheduler.fail([], "it broke", 9.0)
    assert ends(loop.expire(50.0)) == [("a", FinishReason.DEADLINE)]
    assert not loop.scheduler.has_requests


def test_what_expires_makes_room_in_the_same_step():
    loop = SchedulerLoop(max_num_seqs=1)
    loop.add("a", 4, deadline_s=5.0)
    loop.add("b", 4)
    assert loop.step() == {"a": 4}
    loop.expire(5.0)
    assert loop.step() == {"b": 4}


# When the engine thread has to wake up.


def test_there_is_always_something_to_do_while_a_request_runs_and_never_when_idle():
    loop = SchedulerLoop()
    assert loop.scheduler.next_event_s(3.0) is None
    loop.add("a", 4, deadline_s=50.0)
    assert loop.scheduler.next_event_s(3.0) == 3.0
    loop.step()
    assert loop.scheduler.next_event_s(3.0) == 3.0
    loop.abort("a")
    assert loop.scheduler.next_event_s(3.0) is None


def test_a_batch_that_fills_wakes_up_when_its_window_ends_or_before_if_a_request_expires():
    loop = SchedulerLoop(batching="dynamic", batch_window_s=4.0)
    loop.now_s = 10.0
    loop.add("a", 4)
    assert loop.scheduler.next_event_s(10.0) == 14.0
    loop.add("b", 4, deadline_s=2.5)
    assert loop.scheduler.next_event_s(10.0) == 12.5
    assert ends(loop.expire(12.5)) == [("b", FinishReason.DEADLINE)]
    assert loop.scheduler.next_event_s(12.5) == 14.0
