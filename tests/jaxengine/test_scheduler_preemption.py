"""When blocks run out: who gives way, who resumes, and that nothing is lost."""

import pytest

from jaxengine.outputs import FinishReason
from jaxengine.request import RequestStatus
from scheduler_loop import SchedulerLoop, shares


def small_loop(num_usable: int, **changes) -> SchedulerLoop:
    """So many blocks of 8 tokens, each request as long as all of them, no chunks."""
    changes = {"max_num_batched_tokens": 64, "max_model_len": num_usable * 8} | changes
    return SchedulerLoop(num_blocks=num_usable + 1, **changes)


def statuses(*requests) -> list[RequestStatus]:
    return [request.status for request in requests]


def test_the_request_admitted_last_gives_way():
    loop = small_loop(6)
    a, b, c = loop.add("a", 16), loop.add("b", 15), loop.add("c", 16)
    assert loop.step() == {"a": 16, "b": 15, "c": 16}  # 2 blocks each: all 6
    output = loop.schedule()  # a needs its third
    assert shares(output) == {"a": 1, "b": 1}
    assert output.num_preempted == 1
    assert statuses(a, b, c) == [
        RequestStatus.RUNNING,
        RequestStatus.RUNNING,
        RequestStatus.PREEMPTED,
    ]
    assert (c.row, c.num_computed_tokens, c.num_preemptions) == (None, 0, 1)
    assert loop.scheduler.roster.num_preemptions == 1


def test_a_request_that_needs_blocks_and_is_last_itself_gives_way():
    loop = small_loop(5)
    loop.add("a", 16)
    b = loop.add("b", 16)
    loop.step()
    assert loop.step() == {"a": 1}  # a took the fifth block
    assert b.status is RequestStatus.PREEMPTED
    assert loop.kv.num_free_blocks == 2


def test_several_give_way_if_several_need_blocks_and_resume_in_order_of_admission():
    loop = small_loop(6, enable_prefix_caching=False)
    _a, _b, c, d = (loop.add(name, size) for name, size in zip("abcd", (16, 16, 8, 8), strict=True))
    loop.step()  # 2 + 2 + 1 + 1 blocks
    output = loop.schedule()  # a pushes d out, then b pushes c out
    assert (shares(output), output.num_preempted) == ({"a": 1, "b": 1}, 2)
    assert statuses(c, d) == [RequestStatus.PREEMPTED, RequestStatus.PREEMPTED]
    loop.update(output)
    loop.abort("b")
    assert list(loop.step().items()) == [("a", 1), ("c", 9)]
    loop.abort("a")
    assert list(loop.step().items()) == [("c", 1), ("d", 9)]


def test_a_preempted_request_resumes_before_those_who_have_never_run():
    loop = small_loop(5)
    loop.add("a", 16)
    loop.add("b", 16)
    loop.step()
    loop.add("d", 1)
    assert loop.step() == {"a": 1}  # b gave way
    # d would fit into the 2 free blocks, b does not: 17 tokens need 3.
    assert loop.step() == {"a": 1}
    loop.abort("a")
    assert list(loop.step()) == ["b", "d"]


def test_who_gave_way_for_itself_resumes_before_who_was_admitted_later():
    loop = small_loop(4, enable_prefix_caching=False)
    a, b, c = loop.add("a", 16), loop.add("b", 8), loop.add("c", 8)
    loop.step()  # 2 + 1 + 1 blocks
    assert loop.step() == {"a": 1}  # a pushes c out, then b pushes itself out
    assert statuses(a, b, c) == [
        RequestStatus.RUNNING,
        RequestStatus.PREEMPTED,
        RequestStatus.PREEMPTED,
    ]
    loop.abort("a")
    assert list(loop.step().items()) == [("b", 9), ("c", 9)]


def test_nobody_is_admitted_in_a_step_that_preempted():
    loop = small_loop(5)
    loop.add("a", 16)
    loop.add("b", 16)
    loop.step()
    loop.add("d", 1)
    output = loop.schedule()
    assert (shares(output), output.num_preempted) == ({"a": 1}, 1)
    assert loop.kv.num_free_blocks == 2


def test_what_a_preemption_sets_free_is_not_given_away_in_the_same_step():
    loop = small_loop(5)
    loop.add("a", 16, tenant="t")
    loop.add("b", 24, tenant="t")
    loop.step()
    loop.add("s", 1, tenant="s")  # it would go first, but no block is free
    output = loop.schedule()  # a needs its third block; two of those that b held are left
    assert (shares(output), output.num_preempted) == ({"a": 1}, 1)
    loop.update(output)
    assert loop.step() == {"a": 1, "s": 1}


def test_a_resumed_request_computes_all_its_tokens_again_and_samples_the_next():
    loop = small_loop(5, enable_prefix_caching=False)
    loop.add("a", 16)
    b = loop.add("b", range(16))
    loop.step({"b": 30})
    loop.step()  # b gives way
    loop.abort("a")
    output = loop.schedule()
    [item] = output.scheduled
    assert (item.first_position, list(item.token_ids)) == (0, [*range(16), 30])
    assert item.samples
    [result] = loop.update(output, {"b": 31})
    assert (result.new_token_ids, result.num_preemptions) == ((31,), 1)
    assert b.token_ids[16:] == [30, 31]


def test_a_resumed_request_finds_its_own_blocks_if_nobody_took_them():
    loop = small_loop(5)
    loop.add("a", 16)
    b = loop.add("b", 16)
    loop.step()
    loop.step()
    loop.abort("a")
    assert loop.step() == {"b": 1}
    assert b.num_cached_tokens == 0  # of the prompt, at its first admission
    assert (loop.kv.prefix_queries, loop.kv.prefix_hits) == (32, 0)
    assert loop.scheduler.roster.tokens_admitted == 32


def test_the_time_in_the_queue_ends_with_the_first_admission():
    loop = small_loop(5)
    loop.add("a", 16)
    b = loop.add("b", 16)
    loop.step()  # at 1
    loop.step()
    loop.abort("a")
    loop.step()
    assert b.first_scheduled_time_s == 1.0
    assert b.timing(loop.now_s).queue_s == 1.0


# With a token in flight.


def in_flight_preemption():
    """b has been preempted while a token of it is in flight; a runs on."""
    loop = small_loop(5)
    loop.add("a", 16)
    b = loop.add("b", 16)
    first = loop.schedule()
    second = loop.schedule()  # a takes the fifth block; b gives way
    assert shares(second) == {"a": 1}
    assert (b.status, b.num_pending_tokens) == (RequestStatus.PREEMPTED, 1)
    return loop, b, first, second


def test_a_token_in_flight_is_kept():
    loop, b, first, _second = in_flight_preemption()
    outputs = loop.update(first, {"a": 30, "b": 31})
    assert [(o.request_id, o.new_token_ids) for o in outputs] == [("a", (30,)), ("b", (31,))]
    assert b.token_ids[16:] == [31]
    loop.abort("a")
    [item] = loop.schedule().scheduled
    assert item.request is b
    assert item.first_position + item.num_new_tokens == 17
    assert not item.last_is_pending


def test_nobody_resumes_before_its_token_in_flight_has_arrived_and_nobody_overtakes():
    loop, b, first, _second = in_flight_preemption()
    loop.add("d", 1)
    loop.abort("a")
    assert shares(loop.schedule()) == {}
    loop.update(first)
    assert list(shares(loop.schedule())) == ["b", "d"]
    assert b.status is RequestStatus.RUNNING


@pytest.mark.parametrize("end", [{"max_tokens": 1}, {"stop_token_ids": (31,)}])
def test_a_token_in_flight_may_end_a_preempted_request(end):
    loop = small_loop(3)
    loop.add("a", 16)
    b = loop.add("b", 8, **end)
    first = loop.schedule()
    loop.schedule()  # a needs the block of b, whether b awaits its end or runs on
    assert (b.status, b.num_pending_tokens) == (RequestStatus.PREEMPTED, 1)
    [last] = [o for o in loop.update(first, {"a": 30, "b": 31}) if o.request_id == "b"]
    assert last.finished
    assert last.new_token_ids == (31,)
    loop.abort("a")
    assert not loop.scheduler.has_requests
    assert loop.kv.num_free_blocks == loop.kv.num_blocks


def test_abort_of_a_preempted_request():
    loop, _b, first, second = in_flight_preemption()
    output = loop.abort("b")
    assert output is not None
    assert output.finish_reason is FinishReason.ABORT
    assert [o.request_id for o in loop.update(first)] == ["a"]
    assert [o.request_id for o in loop.update(second)] == ["a"]
    assert loop.abort("b") is None


def test_a_failure_frees_a_preempted_request_from_waiting_for_its_token():
    loop, b, _first, _second = in_flight_preemption()
    loop.scheduler.fail([], "it broke", 9.0)
    loop.scheduler.check_integrity()
    assert b.num_pending_tokens == 0
    assert loop.step() == {"a": 16, "b": 16}


# Progress.


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("num_usable", [4, 5, 6, 9])
def test_requests_as_large_as_the_pool_all_finish(num_usable, caching, overlap):
    loop = small_loop(
        num_usable,
        max_model_len=32,
        max_num_batched_tokens=16,
        enable_prefix_caching=caching,
        watermark=0.1,
    )
    for name in "abcdef":
        loop.add(name, 12, max_tokens=20)
    num_tokens = dict.fromkeys("abcdef", 0)
    in_flight, num_steps = [], 0
    while loop.scheduler.has_requests or in_flight:
        # Alone, a request needs 20 steps. Recomputing at each step would cost twice that.
        num_steps += 1
        assert num_steps <= 6 * 2 * 21
        output = loop.schedule()
        in_flight.append(output)
        while len(in_flight) > (overlap and len(output.scheduled) > 0):
            for result in loop.update(in_flight.pop(0)):
                num_tokens[result.request_id] += len(result.new_token_ids)
    assert num_tokens == dict.fromkeys("abcdef", 20)


def test_the_oldest_request_is_never_preempted():
    loop = small_loop(4, max_model_len=32)
    requests = [loop.add(name, 12, max_tokens=20) for name in "abcd"]
    while requests[0].num_output_tokens < 19:
        loop.step()
    assert requests[0].num_preemptions == 0
    assert loop.scheduler.roster.num_preemptions > 0
