"""Priorities: who goes first, who makes room for it, and that this ends.

A step of priority is worth 10 seconds here, and a request's rank is its arrival plus that: lower
ranks go first. The loop's clock takes a second for each look.
"""

import pytest

from jaxengine.request import RequestStatus
from scheduler_loop import SchedulerLoop, shares

policies = pytest.mark.parametrize("policy", ["fair", "priority"])


def add_at(loop: SchedulerLoop, now_s: float, name: str, prompt, **fields):
    loop.now_s = now_s
    return loop.add(name, prompt, **fields)


def order_of_service(loop: SchedulerLoop) -> list[str]:
    """Serve one after the other, each for one token; return the order."""
    order = []
    while loop.scheduler.has_requests:
        [name] = loop.step()
        order.append(name)
        assert len(order) < 100
    return order


# The order.


@policies
def test_a_lower_number_goes_first(policy):
    loop = SchedulerLoop(max_num_seqs=1, scheduling_policy=policy)
    for name, priority in (("low", 2), ("normal", 0), ("high", -1), ("next", 0)):
        loop.add(name, 4, priority=priority, max_tokens=1)
    assert order_of_service(loop) == ["high", "normal", "next", "low"]


@policies
@pytest.mark.parametrize("aging_s", [10.0, 2.5])
def test_a_request_is_overtaken_only_by_those_that_come_within_the_bound(policy, aging_s):
    loop = SchedulerLoop(max_num_seqs=1, scheduling_policy=policy, priority_aging_s=aging_s)
    add_at(loop, 100.0, "low", 4, priority=3, max_tokens=1)  # ranks as if it came 3 agings later
    add_at(loop, 100.0 + 3 * aging_s - 0.1, "within", 4, max_tokens=1)
    add_at(loop, 100.0 + 3 * aging_s, "at", 4, max_tokens=1)  # equal: who came first goes first
    add_at(loop, 100.0 + 3 * aging_s + 0.1, "after", 4, max_tokens=1)
    assert order_of_service(loop) == ["within", "low", "at", "after"]


@policies
def test_a_stream_of_urgent_requests_does_not_starve_a_low_one(policy):
    loop = SchedulerLoop(max_num_seqs=1, scheduling_policy=policy)
    loop.add("low", 4, priority=5, max_tokens=1)  # rank 50
    served, index = [], 0
    while "low" not in served:
        loop.add(f"u{index}", 4, max_tokens=1)  # one at each step: more than can be served
        loop.add(f"v{index}", 4, max_tokens=1)
        index += 1
        served += loop.step()
        assert len(served) < 100
    # A step takes two seconds, so 26 pairs have come at 0, 2, ..., 50 before the rank is reached;
    # the pair of second 50 came after "low" and waits.
    assert served == [f"{kind}{i}" for i in range(25) for kind in "uv"] + ["low"]


def test_with_fcfs_priorities_are_ignored():
    loop = SchedulerLoop(max_num_seqs=1, scheduling_policy="fcfs")
    loop.add("low", 4, priority=2, max_tokens=1)
    loop.add("high", 4, priority=-1, max_tokens=1)
    assert order_of_service(loop) == ["low", "high"]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("priority", ["high", "urgent", "normal", "low"]),
        ("fcfs", ["normal", "low", "high", "urgent"]),
        # Each tenant's own order; t, who came first, goes first, and pays 4 tokens for it, then o.
        ("fair", ["normal", "high", "urgent", "low"]),
    ],
)
def test_between_tenants_priorities_count_only_without_fairness(policy, order):
    loop = SchedulerLoop(max_num_seqs=1, scheduling_policy=policy)
    loop.add("normal", 4, tenant="t", max_tokens=1)
    loop.add("low", 4, tenant="t", priority=1, max_tokens=1)
    loop.add("high", 1, tenant="o", priority=-2, max_tokens=1)
    loop.add("urgent", 1, tenant="o", priority=-1, max_tokens=1)
    assert order_of_service(loop) == order


# Room for those who should go first.


@policies
def test_an_urgent_request_takes_the_row_of_the_last_low_one(policy):
    loop = SchedulerLoop(max_num_seqs=2, scheduling_policy=policy)
    loop.add("a", 4, priority=1)
    b = loop.add("b", 4, priority=1)
    loop.step()
    loop.add("u", 4, max_tokens=2)
    output = loop.schedule()
    assert (shares(output), output.num_preempted) == ({"a": 1, "u": 4}, 1)
    assert (b.status, b.num_preemptions) == (RequestStatus.PREEMPTED, 1)
    loop.update(output)
    loop.add("w", 4, priority=1)
    assert loop.step() == {"a": 1, "u": 1}  # u ends
    assert loop.step() == {"a": 1, "b": 1}  # b goes on before w


def test_the_displaced_request_was_in_the_step_already_and_is_taken_out_again():
    loop = SchedulerLoop(max_num_seqs=2)
    loop.add("a", 4, priority=1)
    b = loop.add("b", 4, priority=1)
    loop.step({"b": 30})
    loop.add("u", 4, max_tokens=1)
    loop.step({"u": 31})
    assert (b.token_ids[4:], b.num_pending_tokens, b.num_computed_tokens) == ([30], 0, 4)
    [item] = [i for i in loop.schedule().scheduled if i.request is b]
    assert (item.first_position, list(item.token_ids)) == (4, [30])


def test_nobody_finds_in_the_cache_what_a_displaced_request_did_not_compute():
    loop = SchedulerLoop(max_num_seqs=2)
    loop.add("a", 4, priority=1)
    loop.add("b", range(7), priority=1)
    loop.step({"b": 7})
    loop.add("u", 4, max_tokens=1)
    assert loop.step() == {"a": 1, "u": 4}  # b's eighth token would have filled its block
    assert loop.kv.num_cached_blocks == 0
    loop.abort("b")
    loop.add("c", range(9))
    assert loop.step() == {"a": 1, "c": 9}


@policies
def test_nobody_yields_to_a_request_of_the_same_priority(policy):
    loop = SchedulerLoop(max_num_seqs=2, scheduling_policy=policy)
    for name in "abc":
        loop.add(name, 4, priority=1)
    loop.step()
    assert loop.step() == {"a": 1, "b": 1}


@policies
def test_who_has_waited_long_enough_does_not_yield_any_more(policy):
    loop = SchedulerLoop(max_num_seqs=2, scheduling_policy=policy)
    loop.add("a", 4, priority=1)
    loop.add("b", 4, priority=1)  # rank 10
    loop.step()
    add_at(loop, 10.0, "late", 4, max_tokens=1)  # rank 10, after b
    assert loop.step() == {"a": 1, "b": 1}


@policies
def test_the_eldest_request_yields_to_nobody(policy):
    loop = SchedulerLoop(max_num_seqs=1, scheduling_policy=policy)
    loop.add("a", 4, priority=9)
    loop.step()
    loop.add("u", 4)
    assert loop.step() == {"a": 1}


def test_with_fcfs_nobody_yields():
    loop = SchedulerLoop(max_num_seqs=2, scheduling_policy="fcfs")
    loop.add("a", 4, priority=1)
    loop.add("b", 4, priority=1, tenant="flooder")
    loop.step()
    loop.add("u", 4, tenant="light")
    assert loop.step() == {"a": 1, "b": 1}


def test_a_request_in_the_middle_of_its_prompt_yields():
    loop = SchedulerLoop(max_num_seqs=2)
    loop.add("a", 4, priority=1)
    loop.add("b", 40, priority=1)
    assert loop.step() == {"a": 4, "b": 12}
    loop.add("u", 4, max_tokens=1)
    assert loop.step() == {"a": 1, "u": 4}
    # The first block that b had computed is cached; of the other 32 tokens, 15 fit.
    assert loop.step() == {"a": 1, "b": 15}


def test_an_urgent_prompt_goes_before_a_low_one_that_has_begun():
    loop = SchedulerLoop()
    loop.add("low", 40, priority=1)
    assert loop.step() == {"low": 16}
    loop.add("urgent", 20)
    loop.add("same", 4, priority=1)
    assert loop.step() == {"urgent": 16}
    # Nobody goes before a prompt that has begun, unless it is more urgent.
    assert loop.step() == {"low": 12, "urgent": 4}
    assert loop.step() == {"low": 12, "same": 3, "urgent": 1}


@policies
def test_as_many_yield_as_it_takes_to_fit_and_not_one_more(policy):
    loop = SchedulerLoop(
        num_blocks=10, max_num_seqs=8, max_num_batched_tokens=64, scheduling_policy=policy
    )
    loop.add("a", 10)
    requests = [loop.add(name, 10, priority=1) for name in "bcd"]
    loop.step()  # 2 blocks each: 8 of 9
    loop.add("u", 32)  # needs 4
    output = loop.schedule()
    assert shares(output) == {"a": 1, "b": 1, "u": 32}
    assert [request.num_preemptions for request in requests] == [0, 1, 1]


@policies
def test_nobody_is_displaced_for_one_that_would_not_fit_even_then(policy):
    loop = SchedulerLoop(
        num_blocks=10, max_num_seqs=8, max_num_batched_tokens=80, scheduling_policy=policy
    )
    loop.add("a", 10)
    requests = [loop.add(name, 10, priority=1) for name in "bcd"]
    loop.step()
    loop.add("u", 60)  # needs 8 of 9, and a keeps 2
    assert loop.step() == {"a": 1, "b": 1, "c": 1, "d": 1}
    assert [request.num_preemptions for request in requests] == [0, 0, 0]


def test_blocks_that_others_hold_as_well_do_not_count_as_room():
    loop = SchedulerLoop(num_blocks=8, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=56)
    loop.add("a", 4)  # 1 block
    shared = [*range(16)]
    b = loop.add("b", [*shared, 1, 1, 1, 1], priority=1)  # 3 blocks
    c = loop.add("c", [*shared, 2, 2, 2, 2], priority=1)  # 2 of them and 1 of its own
    assert loop.step() == {"a": 4, "b": 20, "c": 4}
    assert loop.kv.num_free_blocks == 2
    loop.add("u", 55)  # needs 7, and even without b and c only 6 would be free
    loop.step()
    assert (b.num_preemptions, c.num_preemptions) == (0, 0)
    loop.abort("u")
    loop.add("v", 40)  # needs 5: b and c must go, since what they share is free without both only
    output = loop.schedule()
    assert (b.num_preemptions, c.num_preemptions) == (1, 1)
    assert shares(output) == {"a": 1, "v": 40}


def test_the_watermark_is_kept_when_others_make_room():
    loop = SchedulerLoop(num_blocks=10, max_num_batched_tokens=64, watermark=2)
    loop.add("a", 10)
    b = loop.add("b", 10, priority=1)
    c = loop.add("c", 10, priority=1)
    loop.step()  # 6 of 9 blocks
    loop.add("u", 20)  # 3 blocks, and 2 to be left: 3 are free
    output = loop.schedule()
    assert shares(output) == {"a": 1, "b": 1, "u": 20}
    assert (b.num_preemptions, c.num_preemptions) == (0, 1)


def test_a_request_that_must_grow_takes_from_the_last_by_rank_not_by_admission():
    loop = SchedulerLoop(num_blocks=7, max_num_batched_tokens=64, max_model_len=48)
    loop.add("a", 16)
    low = loop.add("low", 8, priority=5)
    b = loop.add("b", 16)
    loop.step()  # 2 + 1 + 2 blocks of 6
    assert loop.step() == {"a": 1, "b": 1}  # a takes the sixth block, b that of low
    assert (low.num_preemptions, b.num_preemptions) == (1, 0)


def test_a_preempted_request_is_overtaken_only_by_who_outranks_it():
    loop = SchedulerLoop(num_blocks=6, max_num_batched_tokens=64, max_model_len=40)
    loop.add("a", 16)
    loop.add("b", 16, priority=1)
    loop.step()
    assert loop.step() == {"a": 1}  # b gave way; 2 blocks are free, it needs 3
    loop.add("same", 4, priority=1)
    assert loop.step() == {"a": 1}
    loop.add("u", 4)
    assert loop.step() == {"a": 1, "u": 4}


def test_urgent_requests_that_keep_coming_displace_in_no_circles():
    loop = SchedulerLoop(max_num_seqs=3, max_num_batched_tokens=64)
    lows = [loop.add(name, 8, priority=2, max_tokens=6) for name in "abc"]
    loop.step()
    num_urgent = 0
    while loop.scheduler.has_requests:
        if num_urgent < 12:
            loop.add(f"u{num_urgent}", 8, max_tokens=3)
            num_urgent += 1
        loop.step()
    # Rank 20: the first ones to come outrank it. a is the eldest of the low ones, and while urgent
    # ones run it is not the eldest any more; who was displaced comes back and outranks the later.
    assert sum(request.num_preemptions for request in lows) <= num_urgent
