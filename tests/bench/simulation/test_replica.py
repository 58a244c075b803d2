import math

import pytest

from bench.simulation.device import FixedDevice
from bench.simulation.replica import Arrival, Replica
from simulated import small_config


def arrival(index: int, arrival_s: float, prompt: int, output: int, **changes) -> Arrival:
    values = {"prefix_len": 0, "group": 0, "session": index, "tenant": 0, "priority": 0}
    return Arrival(index, arrival_s, prompt, output, **(values | changes))


def run(*arrivals: Arrival, **config) -> Replica:
    replica = Replica(small_config(**config), FixedDevice(seconds=1.0))
    for item in arrivals:
        replica.run_until(item.arrival_s)
        replica.add(item, item.arrival_s)
    replica.run_until(math.inf)
    return replica


def test_a_lone_request_takes_a_step_for_its_prompt_and_each_later_token():
    record = run(arrival(0, 10.0, prompt=4, output=3)).record
    assert list(record.ttft_s) == [1.0]
    assert list(record.decode_s) == [2.0]
    assert list(record.e2e_s) == [3.0]
    assert record.end_s == 13.0
    assert record.num_steps == 3
    assert record.busy_s == 3.0


def test_who_arrives_during_a_step_joins_the_next():
    record = run(arrival(0, 0.0, 4, 3), arrival(1, 1.5, 4, 3)).record
    # Steps end at 1, 2, 3, ...; the second joins the one from 2 to 3.
    assert list(record.index) == [0, 1]
    assert list(record.queue_s) == [0.0, 0.5]
    assert list(record.ttft_s) == [1.0, 1.5]
    assert list(record.e2e_s) == [3.0, 3.5]


def test_with_overlap_the_next_step_is_scheduled_already():
    record = run(arrival(0, 0.0, 4, 3), arrival(1, 0.5, 4, 1), overlap=True).record
    # Two steps are scheduled at 0; at 1 the second request enters the one from 2 to 3.
    assert dict(zip(record.index, record.ttft_s, strict=True)) == {0: 1.0, 1: 2.5}
    assert record.num_steps == 3


def test_a_prompt_beyond_the_budget_takes_two_steps():
    record = run(arrival(0, 0.0, prompt=20, output=1)).record
    assert list(record.ttft_s) == [2.0]
    # Buckets: 16 full; the last 4 tokens in the smallest mixed one.
    assert record.num_tokens == 20
    assert record.wasted_slots == record.num_slots - 20


def test_an_idle_replica_has_no_next_event():
    replica = run(arrival(0, 0.0, 4, 1))
    assert replica.next_event_s == math.inf
    assert not replica.has_requests


def test_the_gaps_between_tokens_are_those_of_the_steps():
    gaps = run(arrival(0, 0.0, 4, 4)).record.gaps.distribution()
    assert gaps is not None
    assert gaps.mean == gaps.max == 1000.0


def test_a_conversation_finds_its_own_past_in_the_cache():
    first = arrival(0, 0.0, prompt=10, output=6, session=7)
    # All 16 tokens before, and 4 new ones; the last token of the answer was never computed.
    second = arrival(1, 20.0, prompt=20, output=1, session=7)
    record = run(first, second).record
    assert list(record.cached_tokens) == [0, 8]


def test_a_group_shares_its_system_prompt_and_no_more():
    one = arrival(0, 0.0, prompt=20, output=1, prefix_len=8, group=3)
    same_group = arrival(1, 20.0, prompt=20, output=1, prefix_len=8, group=3)
    other_group = arrival(2, 40.0, prompt=20, output=1, prefix_len=8, group=4)
    assert list(run(one, same_group, other_group).record.cached_tokens) == [0, 8, 0]


def test_without_prefix_caching_nothing_is_found():
    one, two = (arrival(n, 20.0 * n, prompt=20, output=1, session=5) for n in range(2))
    assert list(run(one, two, enable_prefix_caching=False).record.cached_tokens) == [0, 0]


def test_who_waits_beyond_the_queue_timeout_leaves_unserved():
    long = arrival(0, 0.0, prompt=4, output=10)
    replica = run(long, arrival(1, 0.5, 4, 1), max_num_seqs=1, queue_timeout_s=3.0)
    assert list(replica.record.index) == [0]
    assert list(replica.record.timed_out) == [1]


def test_a_dynamic_batch_waits_for_its_window():
    record = run(arrival(0, 0.0, 4, 1), batching="dynamic", batch_window_s=5.0).record
    assert list(record.queue_s) == [5.0]
    assert list(record.ttft_s) == [6.0]


def test_a_static_batch_keeps_the_rows_of_those_that_ended():
    arrivals = [arrival(n, 0.0, prompt=4, output=output) for n, output in enumerate([1, 1, 1, 5])]
    record = run(*arrivals, batching="static").record
    # 16 prompt tokens fill a bucket; then 4 steps of 8 slots with one live row each.
    assert record.num_tokens == 16 + 4
    assert record.num_slots == 16 + 4 * 8
    assert record.wasted_slots == 4 * 7


def test_the_end_of_a_request_may_bring_another():
    later = [arrival(1, 0.0, 4, 2)]

    def send(number: int, now_s: float) -> None:
        if later:
            replica.add(later.pop(), now_s)

    replica = Replica(small_config(), FixedDevice(seconds=1.0), on_end=send)
    replica.add(arrival(0, 0.0, 4, 2), 0.0)
    replica.run_until(math.inf)
    # It starts with the very next step.
    assert list(replica.record.e2e_s) == [2.0, 2.0]
    assert replica.record.end_s == 4.0


@pytest.mark.parametrize("policy", ["fair", "priority", "fcfs"])
@pytest.mark.parametrize("batching", ["continuous", "dynamic", "static"])
def test_every_request_ends_exactly_once_whatever_the_policy(policy: str, batching: str):
    arrivals = [
        arrival(
            n, 0.7 * n, prompt=3 + 5 * n % 40, output=1 + n % 7, tenant=n % 3, priority=-(n % 2)
        )
        for n in range(40)
    ]
    record = run(*arrivals, scheduling_policy=policy, batching=batching, num_blocks=9).record
    assert sorted(record.index) == list(range(40))
