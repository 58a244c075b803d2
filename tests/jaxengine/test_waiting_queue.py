import gc

from hypothesis import given
from hypothesis import strategies as st

from jaxengine.outputs import FinishReason
from jaxengine.request import Request
from jaxengine.sampling_params import SamplingParams
from jaxengine.tenants import Tenant
from jaxengine.waiting_queue import MAX_STALE, WaitingQueue


def make_request(name: str, tenant: Tenant, rank: float, *, num_prompt: int = 3) -> Request:
    request = Request(
        name, (1,) * num_prompt, SamplingParams(max_tokens=1), seed=0, arrival_time_s=0.0
    )
    request.account, request.rank = tenant, (rank, len(name))
    return request


def end(queue: WaitingQueue, request: Request) -> None:
    request.finish(FinishReason.ABORT)
    queue.forget(request)


def pop_all(queue: WaitingQueue) -> list[str]:
    names = []
    while (request := queue.head()) is not None:
        queue.pop(request)
        names.append(request.request_id)
    assert (len(queue), queue.num_tokens) == (0, 0)
    return names


def test_an_empty_queue_has_no_head():
    queue = WaitingQueue()
    assert queue.head() is None
    assert (len(queue), list(queue), queue.num_tokens) == (0, [], 0)


def test_a_tenants_requests_come_by_rank():
    queue, tenant = WaitingQueue(), Tenant("t", 1.0)
    for rank in (3, 1, 2):
        queue.push(make_request(f"r{rank}", tenant, rank))
    assert pop_all(queue) == ["r1", "r2", "r3"]


def test_the_tenant_with_the_least_service_comes_first_whatever_the_rank():
    queue, a, b = WaitingQueue(), Tenant("a", 1.0), Tenant("b", 1.0)
    a.charge(10)
    queue.push(make_request("a", a, 1))
    queue.push(make_request("b", b, 2))
    assert pop_all(queue) == ["b", "a"]


def test_service_that_is_charged_while_requests_wait_changes_the_order():
    queue, a, b = WaitingQueue(), Tenant("a", 1.0), Tenant("b", 1.0)
    for rank in (1, 2):
        queue.push(make_request(f"a{rank}", a, rank))
        queue.push(make_request(f"b{rank}", b, rank))
    order = []
    for cost in (5, 7, 4, 0):
        request = queue.head()
        assert request is not None
        queue.pop(request)
        request.account.charge(cost)
        order.append(request.request_id)
    assert order == ["a1", "b1", "a2", "b2"]


def test_with_equal_service_the_tenant_that_runs_less_comes_first():
    queue, a, b = WaitingQueue(), Tenant("a", 1.0), Tenant("b", 1.0)
    a.num_running = 1
    queue.push(make_request("a", a, 1))
    queue.push(make_request("b", b, 2))
    assert pop_all(queue) == ["b", "a"]


def test_requests_and_their_tokens_are_counted():
    queue, tenant = WaitingQueue(), Tenant("t", 1.0)
    first = make_request("first", tenant, 1, num_prompt=10)
    second = make_request("second", tenant, 2, num_prompt=20)
    queue.push(first)
    queue.push(second)
    assert (len(queue), queue.num_tokens) == (2, 30)
    second.token_ids += [7, 7]  # a token that was in flight does not change what was counted
    end(queue, second)
    assert (len(queue), queue.num_tokens, list(queue)) == (1, 10, [first])
    queue.pop(first)
    assert (len(queue), queue.num_tokens, list(queue)) == (0, 0, [])


def test_a_request_that_comes_back_is_counted_with_all_its_tokens():
    queue, tenant = WaitingQueue(), Tenant("t", 1.0)
    request = make_request("a", tenant, 1, num_prompt=10)
    queue.push(request)
    queue.pop(request)
    request.token_ids += [7, 7]
    queue.push(request)
    assert queue.num_tokens == 12


def test_of_a_request_that_kept_its_blocks_the_rest_is_counted():
    queue, tenant = WaitingQueue(), Tenant("t", 1.0)
    request = make_request("a", tenant, 1, num_prompt=10)
    request.num_computed_tokens = 9
    queue.push(request)
    assert queue.num_tokens == 1
    request.num_computed_tokens = 0
    queue.recount(request)
    assert queue.num_tokens == 10
    assert pop_all(queue) == ["a"]


def test_what_has_ended_is_skipped():
    queue, a, b = WaitingQueue(), Tenant("a", 1.0), Tenant("b", 1.0)
    requests = [make_request(f"a{rank}", a, rank) for rank in range(4)]
    other = make_request("b", b, 9)
    for request in (*requests, other):
        queue.push(request)
    for request in (requests[0], requests[2], other):
        end(queue, request)
    assert pop_all(queue) == ["a1", "a3"]


def test_a_tenant_whose_requests_have_all_ended_can_come_back():
    queue, tenant = WaitingQueue(), Tenant("t", 1.0)
    first, second = make_request("first", tenant, 1), make_request("second", tenant, 2)
    queue.push(first)
    end(queue, first)
    queue.push(second)
    assert queue.head() is second
    end(queue, second)
    assert queue.head() is None
    queue.push(make_request("third", tenant, 3))
    assert pop_all(queue) == ["third"]


def num_requests_alive() -> int:
    gc.collect()
    return sum(isinstance(thing, Request) for thing in gc.get_objects())


def test_ended_requests_behind_one_that_stays_do_not_pile_up():
    queue, tenant = WaitingQueue(), Tenant("t", 1.0)
    before = num_requests_alive()
    queue.push(make_request("stays", tenant, 0))
    for rank in range(1000):
        request = make_request("left", tenant, rank + 1)
        queue.push(request)
        end(queue, request)
    del request
    assert num_requests_alive() - before <= MAX_STALE + 2
    assert pop_all(queue) == ["stays"]


def test_tenants_behind_one_that_stays_do_not_pile_up():
    queue = WaitingQueue()
    queue.push(make_request("stays", Tenant("first", 1.0), 0))

    def come_and_go(count: int) -> int:
        for index in range(count):
            tenant = Tenant(f"t{index}", 1.0)
            tenant.service = 5.0
            request = make_request("left", tenant, 1)
            queue.push(request)
            end(queue, request)
        gc.collect()
        return sum(isinstance(thing, Tenant) for thing in gc.get_objects())

    before = come_and_go(0)
    assert come_and_go(1000) - before <= MAX_STALE + 2
    assert pop_all(queue) == ["stays"]


@given(st.data())
def test_the_head_is_always_the_best_of_all_that_wait(data):
    """Against a plain search, with charges, ends, and comings back in any order."""
    queue = WaitingQueue()
    tenants = [Tenant(name, weight) for name, weight in (("a", 1.0), ("b", 2.0), ("c", 0.5))]
    waiting: list[Request] = []
    popped: list[Request] = []
    for step in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(("push", "push", "pop", "end", "charge", "back")))
        if action == "push":
            rank = data.draw(st.integers(0, 9))
            request = make_request(f"r{step}", data.draw(st.sampled_from(tenants)), rank)
            request.rank = (rank, step)
            queue.push(request)
            waiting.append(request)
        elif action == "charge":
            data.draw(st.sampled_from(tenants)).charge(data.draw(st.integers(0, 5)))
        elif action == "back" and popped:
            request = popped.pop()
            queue.push(request)
            waiting.append(request)
        elif action == "end" and waiting:
            request = data.draw(st.sampled_from(waiting))
            waiting.remove(request)
            end(queue, request)
        elif action == "pop" and waiting:
            request = queue.head()
            assert request is not None
            queue.pop(request)
            waiting.remove(request)
            popped.append(request)
        head = queue.head()
        assert len(queue) == len(waiting)
        assert set(queue) == set(waiting)
        if head is None:
            assert not waiting
        else:
            least = min(request.account.service for request in waiting)
            assert head.account.service == least
            own = [request for request in waiting if request.account is head.account]
            assert head is min(own, key=lambda request: request.rank)
