"""Requests that gave up their row and kept their blocks."""

import pytest

from jaxengine.kv_cache_manager import KVCacheManager
from jaxengine.outputs import FinishReason
from jaxengine.paused import PausedRequests
from jaxengine.request import Request, RequestStatus
from jaxengine.sampling_params import SamplingParams
from jaxengine.waiting_queue import WaitingQueue
from scheduler_loop import SchedulerLoop, shares


def paused_loop(**changes):
    """b has 9 tokens in 2 blocks of 8 and gave its row to the urgent u; a runs on."""
    loop = SchedulerLoop(max_num_seqs=2, **changes)
    loop.add("a", 4, priority=1)
    b = loop.add("b", 8, priority=1, deadline_s=100.0)
    loop.step()
    assert loop.step() == {"a": 1, "b": 1}
    loop.add("u", 4)
    assert loop.step() == {"a": 1, "u": 4}
    assert (b.status, b.num_computed_tokens, len(b.block_ids)) == (RequestStatus.PREEMPTED, 9, 2)
    return loop, b


def test_blocks_are_taken_from_the_last_by_rank_and_only_as_many_as_are_needed():
    kv = KVCacheManager(num_blocks=9, block_size=4, enable_prefix_caching=False)
    waiting = WaitingQueue()
    paused = PausedRequests(kv, waiting)
    requests = []
    for number in range(3):
        request = Request(
            str(number), (1,) * 7, SamplingParams(max_tokens=1), seed=0, arrival_time_s=0.0
        )
        request.rank = (float(number), number)
        request.num_computed_tokens = 7
        assert kv.reserve(request, 7)
        paused.add(request)
        waiting.push(request)
        requests.append(request)
    assert kv.num_free_blocks == 2
    assert waiting.num_tokens == 0
    assert paused.lacking_blocks(6, for_request=requests[2]) == 0
    assert paused.lacking_blocks(9, for_request=requests[2]) == 3
    paused.make_room(3, for_request=requests[2])  # who needs them does not give its own
    assert [request.num_computed_tokens for request in requests] == [7, 0, 7]
    assert kv.num_free_blocks == 4
    assert waiting.num_tokens == 7
    paused.make_room(100, for_request=requests[2])
    assert [request.num_computed_tokens for request in requests] == [0, 0, 7]
    assert [request in paused for request in requests] == [False, False, True]
    paused.clear()
    assert kv.num_free_blocks == kv.num_blocks


def test_blocks_that_paused_requests_share_are_free_once_all_have_lost_theirs():
    kv = KVCacheManager(num_blocks=9, block_size=4, enable_prefix_caching=True)
    paused = PausedRequests(kv, WaitingQueue())
    requests = []
    for number in range(3):
        request = Request(
            str(number), (1,) * 7, SamplingParams(max_tokens=1), seed=0, arrival_time_s=0.0
        )
        kv.match_prefix(request)
        assert kv.reserve(request, 7)
        kv.remember(request, 7)
        paused.add(request)
        requests.append(request)
    assert kv.num_free_blocks == 4  # one block that all share, and one of each
    assert paused.lacking_blocks(8, for_request=requests[0]) == 2
    paused.discard(requests[2])  # it runs, so the shared block is not to be had
    stranger = Request("s", (2,), SamplingParams(max_tokens=1), seed=0, arrival_time_s=0.0)
    assert paused.lacking_blocks(8, for_request=stranger) == 2
    paused.add(requests[2])
    assert paused.lacking_blocks(8, for_request=stranger) == 0


def test_a_paused_request_goes_on_with_one_token():
    loop, b = paused_loop()
    loop.abort("u")
    assert loop.step({"b": 30}) == {"a": 1, "b": 1}
    assert (b.token_ids[8:], b.num_preemptions) == ([7, 7, 30], 1)


def test_a_request_that_grows_takes_the_blocks_of_paused_ones_before_it_preempts():
    loop, b = paused_loop(
        num_blocks=5, max_model_len=32, enable_prefix_caching=False
    )  # a 1, b 2, u 1
    loop.step()
    assert loop.kv.num_free_blocks == 0
    for _ in range(2):  # a goes from 7 tokens to 9
        assert loop.step() == {"a": 1, "u": 1}
    assert (b.status, b.num_computed_tokens, b.block_ids) == (RequestStatus.PREEMPTED, 0, [])
    loop.abort("u")
    assert loop.step() == {"a": 1, "b": 10}


def test_a_request_that_joins_takes_the_blocks_of_paused_ones():
    loop, b = paused_loop(
        num_blocks=6, max_model_len=40, enable_prefix_caching=False
    )  # one is free
    loop.abort("u")
    loop.add("v", 17)  # three blocks
    assert loop.step() == {"a": 1, "v": 15}
    assert (b.num_computed_tokens, b.block_ids) == (0, [])


def test_a_request_that_does_not_fit_all_the_same_takes_nothing():
    loop, b = paused_loop(num_blocks=6, max_model_len=40, enable_prefix_caching=False)
    loop.abort("u")
    loop.add("v", 33)  # five blocks; two are free, and two are of b
    blocks = list(b.block_ids)
    assert loop.step() == {"a": 1}
    assert (b.num_computed_tokens, b.block_ids) == (9, blocks)
    assert loop.scheduler.num_waiting_tokens == 33 + 1
    loop.abort("a")
    assert loop.step() == {"v": 16}
    assert (b.num_computed_tokens, b.block_ids) == (0, [])
    assert loop.scheduler.num_waiting_tokens == 10


@pytest.mark.parametrize("how", ["abort", "deadline", "error"])
def test_a_paused_request_that_ends_gives_its_blocks_back(how):
    loop, b = paused_loop()
    if how == "abort":
        output = loop.abort("b")
    elif how == "deadline":
        [output] = loop.expire(100.0)
    else:
        [output] = loop.scheduler.fail([b], "broken", loop.now_s)
    assert output is not None
    assert output.finish_reason is FinishReason(how)
    assert b.block_ids == []
    loop.scheduler.check_integrity()


def test_a_failed_step_takes_what_paused_requests_had():
    loop, b = paused_loop()
    loop.scheduler.fail([], "broken", loop.now_s)
    loop.scheduler.check_integrity()
    assert (b.num_computed_tokens, b.block_ids) == (0, [])
    loop.abort("u")
    loop.abort("a")
    assert loop.step() == {"b": 10}


def test_a_request_may_pause_while_its_token_is_in_flight():
    loop = SchedulerLoop(max_num_seqs=2)
    loop.add("a", 4, priority=1)
    b = loop.add("b", 4, priority=1)
    loop.step()
    in_flight = loop.schedule()
    loop.add("u", 4, max_tokens=1)
    second = loop.schedule()
    assert shares(second) == {"a": 1, "u": 4}
    assert (b.num_computed_tokens, b.num_pending_tokens) == (5, 1)
    loop.update(in_flight, {"b": 31})
    loop.update(second)
    assert loop.step({"b": 32}) == {"a": 1, "b": 1}
    assert b.token_ids[4:] == [7, 31, 32]
