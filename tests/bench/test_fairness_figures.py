import math

import pytest

from bench.fairness_figures import (
    FairnessRun,
    Policy,
    fairness_row,
    jain_index,
    max_min_shares,
    summarize_fairness,
)
from bench.summary import Distribution


@pytest.mark.parametrize(
    ("demands", "capacity", "expected"),
    [
        # Equal parts of 10 are more than a and b want; c takes the rest.
        ({"a": 2, "b": 3, "c": math.inf}, 30, {"a": 2, "b": 3, "c": 25}),
        # a wants less than a third; b and c halve what it leaves.
        ({"c": math.inf, "a": 2, "b": 20}, 12, {"a": 2, "b": 5, "c": 5}),
        ({"a": 1, "b": 2}, 12, {"a": 1, "b": 2}),
        ({"a": 5, "b": 5}, 4, {"a": 2, "b": 2}),
        ({}, 4, {}),
    ],
)
def test_shares_are_max_min_fair(demands: dict, capacity: float, expected: dict):
    assert max_min_shares(demands, capacity) == expected


def test_jains_index_is_one_for_equals_and_one_nth_for_one_of_n():
    assert jain_index([3, 3, 3]) == 1
    assert jain_index([5, 0, 0, 0]) == 0.25
    assert jain_index([1, 2]) == pytest.approx(9 / 10)  # 3² / (2 · 5)
    assert jain_index([0, 0]) is None
    assert jain_index([]) is None


def make_run(policy: Policy, *, flooded: bool, p99: float = 100, **service: float) -> FairnessRun:
    return FairnessRun(
        policy=policy,
        flooded=flooded,
        light_ttft_ms=Distribution(mean=p99, p50=p99 / 2, p90=p99, p99=p99, max=p99),
        service=service or {"light-1": 10, "light-2": 10},
        demand={"light-1": 10, "light-2": 10},
        duration_s=10.0,
    )


def test_tenants_that_all_got_what_they_are_entitled_to_have_an_index_of_one():
    run = make_run("fair", flooded=True, **{"light-1": 10, "light-2": 10, "flood": 80})
    assert run.jain_index == pytest.approx(1)
    assert run.tokens_per_s == 10


def test_light_tenants_that_starve_lower_the_index():
    # 90 were served: 10, 10 and 70 are fair. One light tenant got nothing, the flood 80.
    run = make_run("fcfs", flooded=True, **{"light-1": 0, "light-2": 10, "flood": 80})
    shares = [0, 1, 80 / 70]
    expected = sum(shares) ** 2 / (3 * sum(share**2 for share in shares))
    assert run.jain_index == pytest.approx(expected)


def test_without_a_flood_only_the_light_tenants_count():
    assert make_run("fair", flooded=False).jain_index == 1


def test_figures_are_medians_of_the_rounds():
    flood = {"light-1": 10, "light-2": 10}
    runs = []
    for alone, fair, tokens in ((100, 120, 97), (100, 160, 96), (200, 280, 90)):
        runs += [
            make_run("fair", flooded=False, p99=alone),
            make_run("fair", flooded=True, p99=fair, **flood, flood=tokens - 20),
            make_run("fcfs", flooded=True, p99=1000, **flood, flood=80),
        ]
    figures = summarize_fairness(runs)
    assert figures.alone_p99_ms == 100
    assert figures.ttft_ratios == {"fair": 1.4, "fcfs": 10.0}  # of 1.2, 1.6, 1.4 and 10, 10, 5
    assert figures.throughput_ratio == pytest.approx(0.96)
    assert figures.jain_indices["fair"] == pytest.approx(1)
    assert [verdict.is_met for verdict in figures.verdicts()] == [True, True, False]


def test_a_run_is_a_row():
    run = make_run("fair", flooded=True, p99=150, **{"light-1": 10, "light-2": 10, "flood": 80})
    assert fairness_row(run, alone_p99_ms=100) == [
        *("fair, beside the flood", "75.0/150", "1.50x", "1.000", "10.0", "8.0", "2.0")
    ]
