import itertools

import pytest

from bench.simulation.scheduler_cost import measure_step_cost


@pytest.mark.parametrize("policy", ["fair", "priority", "fcfs"])
def test_every_reading_of_the_clock_is_accounted_for(policy: str):
    ticks = itertools.count()  # every reading takes a millisecond
    cost = measure_step_cost(
        num_running=8,
        num_waiting=4,
        num_steps=10,
        policy=policy,
        clock=lambda: next(ticks) / 1000,
    )
    assert (cost.num_running, cost.num_waiting, cost.num_steps) == (8, 4, 10)
    assert cost.schedule_ms == pytest.approx(1.0)
    assert cost.update_ms == pytest.approx(1.0)
    assert cost.step_ms == cost.step_p99_ms == cost.step_max_ms == pytest.approx(2.0)
    assert cost.add_us == pytest.approx(1000 / 4)


def test_nobody_waits_where_nobody_is_added():
    cost = measure_step_cost(num_running=1, num_waiting=0, num_steps=2)
    assert cost.add_us == 0.0
    assert cost.as_dict()["num_waiting"] == 0
