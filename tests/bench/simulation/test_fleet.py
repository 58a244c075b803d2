import numpy as np
import pytest

from bench.simulation.fleet import simulate, simulate_closed_loop
from bench.simulation.record import ReplicaRecord
from bench.simulation.router import ROUTERS
from bench.simulation.workload import WorkloadConfig, fixed_lengths, make_trace
from simulated import small_fleet, trace_of


def test_three_requests_on_two_replicas_by_hand():
    trace = trace_of([(0.0, 4, 3), (0.5, 4, 3), (1.5, 4, 3)])
    first, second = simulate(trace, small_fleet(2))
    # Replica 0 has steps from 0 on and takes the third request into the step from 2 to 3.
    assert list(first.index) == [0, 2]
    assert list(first.ttft_s) == [1.0, 1.5]
    assert list(first.e2e_s) == [3.0, 3.5]
    # Replica 1 wakes at 0.5 and has its own rhythm.
    assert list(second.index) == [1]
    assert list(second.ttft_s) == [1.0]
    assert second.end_s == 3.5


def test_the_least_loaded_replica_is_the_one_that_has_finished():
    trace = trace_of([(0.0, 4, 9), (0.0, 4, 1), (5.0, 4, 1)])
    first, second = simulate(trace, small_fleet(2, router="least-loaded"))
    assert list(first.index) == [0]
    assert list(second.index) == [1, 2]


def test_prefix_affine_routing_sends_a_conversation_back_to_its_cache():
    turns = [(20.0 * turn, 10 + 16 * turn, 6) for turn in range(3)]
    trace = trace_of(turns, session=[4, 4, 4])
    records = simulate(trace, small_fleet(8, router="prefix-affine"))
    busy = [record for record in records if record.num_steps]
    assert [list(record.index) for record in busy] == [[0, 1, 2]]
    # Of 16 and of 32 tokens before, the last was never computed: 1 and 3 full blocks.
    assert list(busy[0].cached_tokens) == [0, 8, 24]


def columns(records: list[ReplicaRecord]) -> list[tuple]:
    return [(list(r.index), list(r.e2e_s), r.num_steps, r.kv_use_s) for r in records]


def drawn_trace(seed: int = 0):
    return make_trace(
        WorkloadConfig(
            num_requests=120,
            request_rate=2.0,
            lengths=fixed_lengths(12, 5),
            num_groups=3,
            shared_prefix_len=8,
            turns=2.0,
            think_s=5.0,
            max_model_len=64,
            seed=seed,
        )
    )


@pytest.mark.parametrize("router", ROUTERS)
def test_every_request_ends_exactly_once_and_a_seed_repeats_the_run(router: str):
    fleet = small_fleet(5, router=router, overlap=True)
    first, second = (simulate(drawn_trace(), fleet) for _ in range(2))
    assert sorted(ReplicaRecord.merged(first).index) == list(range(120))
    assert columns(first) == columns(second)
    assert columns(first) != columns(simulate(drawn_trace(seed=1), fleet))


def test_processes_live_through_the_same_as_one_clock():
    fleet = small_fleet(3)
    together = simulate(drawn_trace(), fleet)
    apart = simulate(drawn_trace(), fleet, num_processes=2)
    assert columns(together) == columns(apart)


def test_a_closed_loop_keeps_so_many_in_flight():
    # Each takes 2 steps, two at a time: 3 pairs.
    trace = trace_of([(99.0, 4, 2)] * 6)
    record = simulate_closed_loop(trace, small_fleet(), concurrency=2)
    assert record.end_s == 6.0
    assert list(record.e2e_s) == [2.0] * 6


def test_a_burst_starts_all_at_once():
    config = WorkloadConfig(num_requests=3, request_rate=np.inf, lengths=fixed_lengths(4, 1))
    (record,) = simulate(make_trace(config), small_fleet())
    assert list(record.e2e_s) == [1.0, 1.0, 1.0]
