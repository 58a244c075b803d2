import pytest

from bench.simulation.figures import figures_of
from bench.simulation.fleet import simulate
from bench.summary import Goodput
from simulated import small_fleet, trace_of

# On one replica with a second a step: TTFT 1, 1.5 and 1 s; E2E 3, 3.5 and 1 s.
TRACE = trace_of([(0.0, 4, 3), (1.5, 4, 3), (10.0, 4, 1)], tenant=[0, 1, 1], priority=[0, 0, -1])


def figures(goodput: Goodput | None = None, **config):
    return figures_of(TRACE, simulate(TRACE, small_fleet(**config)), goodput=goodput)


def test_the_figures_of_three_requests_by_hand():
    result = figures()
    assert result.num_completed == result.num_requests == 3
    # Steps from 0 to 5 and from 10 to 11.
    assert result.duration_s == 11.0
    assert result.requests_per_s == pytest.approx(3 / 11)
    assert result.request_rate == pytest.approx(3 / 10)
    assert result.output_tokens_per_s == pytest.approx(7 / 11)
    assert result.prompt_tokens_per_s == pytest.approx(12 / 11)
    assert result.busy_share == pytest.approx(6 / 11)
    assert result.num_steps == 6
    # One step, from 2 to 3, has two requests.
    assert result.mean_seqs == pytest.approx(7 / 6)
    assert result.ttft_ms is not None
    assert result.ttft_ms.mean == pytest.approx(3500 / 3)
    assert result.ttft_ms.max == 1500
    assert result.e2e_ms is not None
    assert result.e2e_ms.p50 == 3000
    assert result.tpot_ms is not None
    assert result.tpot_ms.mean == result.tpot_ms.max == 1000
    assert result.queue_ms is not None
    assert result.queue_ms.max == 500
    assert result.imbalance == 1.0
    assert (result.num_preemptions, result.preemption_share) == (0, 0.0)
    assert (result.goodput_per_s, result.goodput_share) == (None, None)


def test_tenants_and_urgent_requests_are_told_apart():
    result = figures()
    assert result.heavy_ttft_p99_ms == 1000
    assert result.light_ttft_p99_ms == pytest.approx(1495)  # between 1000 and 1500
    assert result.urgent_ttft_p99_ms == 1000


@pytest.mark.parametrize(
    ("demand", "share"),
    [("ttft:1000", 2 / 3), ("ttft:1500,itl:1000", 1), ("itl:999", 1 / 3), ("e2e:3000", 2 / 3)],
)
def test_goodput_counts_the_requests_that_met_every_demand(demand: str, share: float):
    result = figures(Goodput.parse(demand))
    assert result.goodput_share == pytest.approx(share)
    assert result.goodput_per_s == pytest.approx(3 * share / 11)


def test_half_full_blocks_are_in_use_while_the_device_works():
    # Each request of 4 + 1 tokens holds 1 of 16 blocks, in steps with 1, 1, 2, 1, 1, 1 of them.
    assert figures().kv_use_max == pytest.approx(2 / 16)


def test_who_timed_out_is_counted():
    result = figures(max_num_seqs=1, queue_timeout_s=0.5)
    assert result.num_timed_out == 1
    assert result.num_completed == 2


def test_imbalance_is_the_busiest_over_the_mean():
    trace = trace_of([(0.0, 4, 3), (0.0, 4, 1)])
    # 6 and 4 tokens computed: the last sampled is not.
    assert figures_of(trace, simulate(trace, small_fleet(2))).imbalance == pytest.approx(6 / 5)
