import weakref

from jaxengine.expiry import LEAST_SWEPT, ExpiryQueue
from jaxengine.outputs import FinishReason
from jaxengine.request import Request
from jaxengine.sampling_params import SamplingParams


def make_request(
    name: str,
    *,
    arrival_s: float = 0.0,
    queue_timeout_s: float | None = None,
    deadline_s: float | None = None,
) -> Request:
    return Request(
        name,
        (1, 2, 3),
        SamplingParams(max_tokens=1),
        seed=0,
        arrival_time_s=arrival_s,
        queue_timeout_s=queue_timeout_s,
        deadline_s=deadline_s,
    )


def due(queue: ExpiryQueue, now_s: float) -> list[tuple[str, FinishReason]]:
    """End those whose time is up, as the scheduler does; return their names and why."""
    ended = []
    for request, reason in queue.pop_due(now_s):
        request.finish(reason)
        ended.append((request.request_id, reason))
    return ended


def test_what_has_no_limit_never_expires():
    queue = ExpiryQueue()
    queue.add(make_request("a"))
    assert queue.next_s() is None
    assert due(queue, 1e9) == []


def test_times_count_from_arrival_and_the_soonest_comes_first():
    queue = ExpiryQueue()
    queue.add(make_request("late", arrival_s=10.0, deadline_s=5.0))
    queue.add(make_request("soon", arrival_s=11.0, queue_timeout_s=2.0))
    queue.add(make_request("last", arrival_s=0.0, deadline_s=20.0))
    assert queue.next_s() == 13.0
    assert due(queue, 12.9) == []
    assert due(queue, 15.0) == [
        ("soon", FinishReason.QUEUE_TIMEOUT),
        ("late", FinishReason.DEADLINE),
    ]
    assert queue.next_s() == 20.0


def test_a_request_whose_both_limits_have_passed_is_due_once():
    queue = ExpiryQueue()
    queue.add(make_request("a", queue_timeout_s=3.0, deadline_s=4.0))
    assert due(queue, 5.0) == [("a", FinishReason.QUEUE_TIMEOUT)]
    assert queue.next_s() is None


def test_a_queue_timeout_does_not_matter_once_a_request_has_started():
    queue = ExpiryQueue()
    request = make_request("a", queue_timeout_s=3.0, deadline_s=9.0)
    queue.add(request)
    request.first_scheduled_time_s = 2.0
    assert queue.next_s() == 9.0
    assert due(queue, 3.0) == []
    assert due(queue, 9.0) == [("a", FinishReason.DEADLINE)]


def test_what_has_ended_does_not_expire():
    queue = ExpiryQueue()
    request = make_request("a", queue_timeout_s=3.0, deadline_s=9.0)
    queue.add(request)
    request.finish(FinishReason.ABORT)
    assert queue.next_s() is None
    assert due(queue, 10.0) == []


def test_ended_requests_are_not_kept_until_their_time_would_be_up():
    queue = ExpiryQueue()
    stays = make_request("stays", deadline_s=3600.0)
    queue.add(stays)
    ended = weakref.WeakSet()
    for index in range(1000):
        request = make_request(str(index), deadline_s=3600.0, queue_timeout_s=60.0)
        ended.add(request)
        queue.add(request)
        request.finish(FinishReason.LENGTH)
    assert len(ended) <= 2 * LEAST_SWEPT
    assert due(queue, 3600.0) == [("stays", FinishReason.DEADLINE)]
