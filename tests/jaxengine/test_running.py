import pytest

from jaxengine.request import Request, RequestStatus
from jaxengine.running import RunningRequests
from jaxengine.sampling_params import SamplingParams
from jaxengine.tenants import Tenant


def some_requests(count):
    tenant = Tenant("a", 1.0)
    requests = []
    for index in range(count):
        request = Request(
            str(index), (1, 2), SamplingParams(max_tokens=1), seed=0, arrival_time_s=0.0
        )
        request.account = tenant
        requests.append(request)
    return requests


def test_each_has_a_row_of_its_own_in_order_of_admission():
    running = RunningRequests(3)
    requests = some_requests(3)
    for request in requests:
        assert running.has_free_row
        running.add(request)
    assert not running.has_free_row
    assert list(running) == requests
    assert {request.row for request in running} == {0, 1, 2}
    assert {request.status for request in running} == {RequestStatus.RUNNING}
    assert requests[0].account.num_running == len(running) == 3
    running.check_integrity()


def test_a_row_that_is_given_up_is_the_next_to_be_taken():
    running = RunningRequests(2)
    first, second, third = some_requests(3)
    running.add(first)
    running.add(second)
    row = first.row
    running.remove(first)
    assert first not in running
    assert (first.row, first.account.num_running) == (None, 1)
    running.add(third)
    assert (third.row, list(running)) == (row, [second, third])


def test_a_row_that_two_have_is_found():
    running = RunningRequests(2)
    first, second = some_requests(2)
    running.add(first)
    running.add(second)
    second.row = first.row
    with pytest.raises(AssertionError, match="row"):
        running.check_integrity()
