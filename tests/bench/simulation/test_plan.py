import itertools
import math

from bench.simulation.device import FixedDevice
from bench.simulation.plan import Choices, SimulationPlan, run_plan, variants_of
from bench.simulation.workload import WorkloadConfig, fixed_lengths
from bench.summary import Goodput
from simulated import small_config


def plan_with(**changes) -> SimulationPlan:
    workload = WorkloadConfig(
        num_requests=12, request_rate=1.0, lengths=fixed_lengths(4, 2), max_model_len=64
    )
    values = {"workload": workload, "engine": small_config(), "device": FixedDevice(seconds=0.01)}
    return SimulationPlan(**(values | changes))


def test_every_combination_is_a_variant_and_rates_vary_fastest():
    choices = Choices(
        num_replicas=(1, 2), batching=("continuous", "static"), rates_per_replica=(1, 2)
    )
    found = [(v.num_replicas, v.batching, v.rate_per_replica) for v in variants_of(choices)]
    assert found == list(itertools.product((1, 2), ("continuous", "static"), (1, 2)))


def test_a_run_is_named_by_what_sets_it_apart():
    choices = Choices(
        num_replicas=(1, 2), scheduling_policies=("fair", "fcfs"), target_itls_s=(None, 0.05)
    )
    names = [result.name for result in run_plan(plan_with(), choices)]
    assert names[0] == "1 replica, fair, no ITL target"
    assert names[-1] == "2 replicas, fcfs, ITL 50 ms"
    assert len(set(names)) == 8


def test_one_run_is_named_by_its_size():
    (result,) = run_plan(plan_with(), Choices(num_replicas=(3,)))
    assert result.name == "3 replicas"


def test_more_replicas_get_more_load():
    few, many = run_plan(plan_with(), Choices(num_replicas=(1, 4), rates_per_replica=(5.0,)))
    assert few.figures.request_rate is not None
    assert many.figures.request_rate is not None
    assert many.figures.request_rate / few.figures.request_rate == 4.0


def test_all_at_once_is_a_rate_too():
    (result,) = run_plan(plan_with(), Choices(rates_per_replica=(math.inf,)))
    assert result.figures.num_completed == 12
    assert result.figures.request_rate is None


def test_what_is_held_fixed_reaches_every_run():
    plan = plan_with(goodput=Goodput(e2e_ms=1.0), engine=small_config(max_num_seqs=1))
    (result,) = run_plan(plan, Choices())
    assert result.figures.goodput_share == 0.0
    assert result.figures.mean_seqs == 1.0


def test_progress_is_reported_with_the_time_it_took():
    heard, ticks = [], itertools.count()
    results = run_plan(
        plan_with(),
        Choices(routers=("round-robin", "least-loaded")),
        report=heard.append,
        clock=lambda: float(next(ticks)),
    )
    assert heard == results
    assert [result.wall_s for result in results] == [1.0, 1.0]
    assert all(result.exact_loads for result in results)
    assert sum(results[0].tokens_per_replica) == 12 * 5
