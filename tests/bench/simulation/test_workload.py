import math

import numpy as np
import pytest

from bench.simulation.workload import (
    LENGTHS,
    Lognormal,
    Quantiles,
    WorkloadConfig,
    fixed_lengths,
    make_trace,
)


def trace_with(**changes):
    return make_trace(WorkloadConfig(**({"num_requests": 20_000, "request_rate": 50.0} | changes)))


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    # Medians in the papers that the module names.
    [
        ("azure-conversation", 1020, 129),
        ("azure-code", 1500, 13),
        ("sharegpt", 74, 487),
        ("burstgpt", 582, 243),
    ],
)
def test_half_of_the_requests_are_no_longer_than_the_published_median(name, prompt, output):
    trace = trace_with(lengths=LENGTHS[name])
    assert np.median(trace.prompt_len) == pytest.approx(prompt, rel=0.06)
    assert np.median(trace.output_len) == pytest.approx(output, rel=0.06)


def test_sharegpt_has_its_published_tail():
    trace = trace_with(lengths=LENGTHS["sharegpt"])
    assert np.percentile(trace.prompt_len, [80, 95]) == pytest.approx([348, 1484], rel=0.1)
    assert np.percentile(trace.output_len, [80, 95, 99]) == pytest.approx([781, 988, 1234], rel=0.1)


def test_a_lognormal_has_its_median_and_spread():
    lengths = Lognormal(100, 0.5, 10_000).draw(np.random.default_rng(0), 50_000)
    assert np.median(lengths) == pytest.approx(100, rel=0.02)
    # One standard deviation above: e**0.5 times the median.
    assert np.percentile(lengths, 84.13) == pytest.approx(164.9, rel=0.03)


def test_lengths_are_cut_and_never_zero():
    assert Lognormal(5, 3.0, 50).draw(np.random.default_rng(0), 1000).max() == 50
    assert Lognormal(0.01, 1.0, 50).draw(np.random.default_rng(0), 1000).min() == 1


def test_quantiles_are_interpolated_straight_or_by_logarithm():
    points = {0: 1, 1: 100}
    straight = Quantiles(points).draw(np.random.default_rng(0), 50_000)
    curved = Quantiles(points, is_logarithmic=True).draw(np.random.default_rng(0), 50_000)
    assert np.median(straight) == pytest.approx(50.5, rel=0.03)
    assert np.median(curved) == pytest.approx(10, rel=0.03)


def test_the_same_seed_draws_the_same_requests():
    one, two, other = (trace_with(seed=seed, turns=2.0) for seed in (0, 0, 1))
    for first, second in zip(one.columns, two.columns, strict=True):
        assert np.array_equal(first, second)
    assert not np.array_equal(one.arrival_s, other.arrival_s)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_vary_as_their_gamma_distribution_says(burstiness: float):
    gaps_s = np.diff(trace_with(burstiness=burstiness).arrival_s)
    assert gaps_s.mean() == pytest.approx(1 / 50, rel=0.05)
    # The coefficient of variation of a gamma distribution is one over the root of its shape.
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.07)


def test_requests_come_in_order_of_arrival():
    assert np.diff(trace_with(turns=3.0).arrival_s).min() >= 0


def test_conversations_come_at_the_rate_asked_for_from_the_first_second_to_the_last():
    trace = trace_with(turns=4.0, think_s=20.0)
    counts, _ = np.histogram(trace.arrival_s, bins=8, range=(0, 20_000 / 50))
    assert counts.sum() == 20_000
    assert counts == pytest.approx([2500] * 8, rel=0.15)


def test_a_conversation_has_its_mean_number_of_turns():
    trace = trace_with(turns=4.0, think_s=0.1)
    # So short that few were under way at the start.
    assert len(set(trace.session.tolist())) == pytest.approx(5000, rel=0.05)


def test_a_turn_begins_with_all_that_came_before():
    trace = trace_with(turns=3.0, num_requests=500, shared_prefix_len=100, max_model_len=100_000)
    for session in range(20):
        turns = trace.take(np.flatnonzero(trace.session == session))
        for before, after in zip(range(len(turns)), range(1, len(turns)), strict=False):
            spoken = turns.prompt_len[before] + turns.output_len[before]
            assert turns.prompt_len[after] > spoken
            assert turns.arrival_s[after] > turns.arrival_s[before]


def test_no_request_is_longer_than_the_context():
    trace = trace_with(turns=20.0, max_model_len=3000, shared_prefix_len=500)
    assert (trace.prompt_len + trace.output_len).max() <= 3000
    assert (trace.prompt_len - trace.prefix_len).min() >= 1


def test_popular_system_prompts_follow_zipfs_law():
    counts = np.bincount(trace_with(num_groups=4).group)
    # 1, 1/2, 1/3, 1/4 of the first.
    assert counts / counts[0] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4], rel=0.08)


def test_a_heavy_tenant_sends_its_share_and_the_others_the_rest():
    counts = np.bincount(trace_with(num_tenants=10, heavy_share=0.7).tenant)
    assert counts[0] / 20_000 == pytest.approx(0.7, rel=0.03)
    assert counts[1:] / 20_000 == pytest.approx([0.3 / 9] * 9, rel=0.2)


def test_urgent_requests_have_a_priority_before_the_default():
    priority = trace_with(urgent_share=0.1).priority
    assert set(priority.tolist()) == {0, -1}
    assert (priority == -1).mean() == pytest.approx(0.1, rel=0.1)


def test_an_infinite_rate_sends_everything_at_once():
    assert trace_with(request_rate=math.inf).arrival_s.max() == 0


def test_fixed_lengths_are_fixed():
    trace = trace_with(lengths=fixed_lengths(7, 3))
    assert set(trace.prompt_len.tolist()) == {7}
    assert set(trace.output_len.tolist()) == {3}


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_requests": 0},
        {"request_rate": 0.0},
        {"request_rate": math.nan},
        {"burstiness": 0.0},
        {"turns": 0.5},
        {"urgent_share": 1.5},
        {"heavy_share": -0.1},
        {"shared_prefix_len": 8192},
    ],
)
def test_what_cannot_be_drawn_is_refused(wrong):
    with pytest.raises(ValueError, match=r"must|at least|between|room"):
        trace_with(**wrong)
