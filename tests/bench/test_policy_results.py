import math
from array import array
from xml.etree import ElementTree

import orjson
import pytest

from bench.objective import Probe
from bench.policy_plan import PolicyPlan, Workload
from bench.policy_results import (
    PROBE_HEADINGS,
    ROW_HEADINGS,
    Mode,
    PolicyRun,
    ideal_lines,
    objective_verdicts,
    policy_document,
    policy_panels,
    policy_rows,
    policy_verdicts,
    probe_rows,
    summarize_policies,
)
from bench.scenario import ScenarioRun
from bench.scrape import EngineCounters
from bench.stream import RequestRecord
from bench.summary import LoadLevel, summarize
from bench.svg import draw_figure

BURST = Workload(lengths="exponential", arrivals="burst")
PLAN = PolicyPlan(
    batch_size=2,
    num_batches=2,
    output_mean=4,
    output_cap=16,
    lengths=("exponential",),
    arrivals=("burst",),
)


def make_run(
    mode: Mode, duration_s: float, *, round_number: int = 0, failed: bool = False
) -> PolicyRun:
    """Ten tokens in `duration_s`, the engine busy for one second, 10 % wasted in ended rows."""
    record = RequestRecord(
        index=0,
        start_s=0.0,
        first_token_s=duration_s / 2,
        last_token_s=duration_s,
        end_s=duration_s,
        gaps_s=array("d", [duration_s / 2]),
        gap_tokens=array("L", [9]),
        first_tokens=1,
        method="usage",
        output_tokens=10,
        finish_reason="length",
    )
    records = [record]
    if failed:
        records.append(RequestRecord(index=1, start_s=0.0, end_s=0.1, error="http 500"))
    summary = summarize(LoadLevel(), records, output_len=None, client_cpu_s=0.0)
    counters = EngineCounters(busy_s=1.0, step_tokens=90, wasted_slots={"finished_row": 10})
    return PolicyRun(mode, BURST, None, round_number, ScenarioRun(summary, counters, records))


def runs_of_two_rounds() -> list[PolicyRun]:
    return [
        make_run("continuous", 2.0),
        make_run("static", 6.0),
        make_run("continuous", 4.0, round_number=1),
        make_run("static", 8.0, round_number=1),
    ]


def test_figures_are_medians_and_the_gain_is_taken_round_by_round():
    (result,) = summarize_policies(PLAN, runs_of_two_rounds())
    assert list(result.modes) == ["continuous", "static"]
    assert result.modes["continuous"].output_tokens_per_s == (5 + 2.5) / 2
    assert result.modes["continuous"].busy_share == (1 / 2 + 1 / 4) / 2
    assert result.modes["static"].wasted_shares == {
        "bucket": 0.0,
        "prompt_padding": 0.0,
        "finished_row": 0.1,
    }
    # 3 in the first round, 2 in the second.
    assert result.gains == {"static": 2.5}
    assert result.reached_share == pytest.approx(2.5 / result.potential.ideal_ratio)
    assert result.finite_share == pytest.approx(2.5 / result.potential.finite_ratio)


def test_the_potential_is_that_of_the_very_lengths_that_were_sent():
    (result,) = summarize_policies(PLAN, runs_of_two_rounds())
    lengths = PLAN.output_lens("exponential")
    longest = [max(lengths[:2]), max(lengths[2:])]
    assert result.potential.ideal_ratio == pytest.approx((sum(longest) / 2) / (sum(lengths) / 4))
    assert result.longest_output == max(lengths)


def test_every_mode_of_every_workload_is_a_row():
    rows = policy_rows(summarize_policies(PLAN, runs_of_two_rounds()))
    assert all(len(row) == len(ROW_HEADINGS) for row in rows)
    # 3.75 tok/s against (10/6 + 10/8) / 2 = 1.458.
    assert rows[0][:3] == ["exponential, burst", "continuous", "3.8"]
    assert rows[0][-1] == "2.57x"
    assert rows[1][-2:] == ["0.0/0.0/10.0", "1.00x"]


def test_without_a_static_run_nothing_is_compared():
    results = summarize_policies(PLAN, [make_run("continuous", 2.0)])
    assert results[0].reached_share is None
    assert policy_rows(results)[0][-1] == "-"
    assert ideal_lines(results) == []
    assert policy_verdicts(results) == []


def test_the_share_of_the_ideal_is_said_and_judged():
    results = summarize_policies(PLAN, runs_of_two_rounds())
    (line,) = ideal_lines(results)
    assert line.startswith("exponential, burst: continuous over static 2.50x; ideal ")
    (verdict,) = policy_verdicts(results)
    assert verdict.measured == results[0].reached_share
    assert verdict.is_met is (results[0].reached_share >= 0.75)


def test_a_mode_whose_requests_all_failed_has_no_latencies_and_does_not_crash():
    record = RequestRecord(index=0, start_s=0.0, end_s=1.0, error="http 500")
    summary = summarize(LoadLevel(), [record], output_len=None, client_cpu_s=0.0)
    failed = PolicyRun("static", BURST, None, 0, ScenarioRun(summary, EngineCounters(), [record]))
    results = summarize_policies(PLAN, [make_run("continuous", 2.0), failed])
    assert math.isnan(results[0].modes["static"].ttft_ms.p99)
    assert results[0].modes["static"].num_failed == 1
    assert results[0].gains == {}
    assert len(policy_rows(results)) == 2


def make_probe(rate: float, holds: bool, **fields: object) -> Probe:
    values = {"num_requests": 8, "ttft_p99_ms": 100.0, "itl_p99_ms": None, "num_failed": 0}
    return Probe(rate=rate, holds=holds, **{**values, "ended_early": False, **fields})


def test_rates_at_the_objective_are_compared():
    verdicts = objective_verdicts(
        {
            "continuous": [make_probe(6.0, True), make_probe(8.0, False)],
            "dynamic": [make_probe(4.0, True)],
            "static": [make_probe(1.0, True)],
        }
    )
    assert [(verdict.measured, verdict.is_met) for verdict in verdicts] == [
        (6.0, True),
        (1.5, False),
    ]


def test_a_mode_that_never_keeps_the_objective_is_beaten_without_bound():
    never = [make_probe(1.0, False)]
    (verdict,) = objective_verdicts({"continuous": [make_probe(2.0, True)], "static": never})
    assert (verdict.measured, verdict.is_met) == (math.inf, True)
    (verdict,) = objective_verdicts({"continuous": never, "static": never})
    assert (verdict.measured, verdict.is_met) == (None, False)


def test_every_probe_is_a_row_by_rising_rate():
    rows = probe_rows({"static": [make_probe(2.0, False, ended_early=True), make_probe(1.0, True)]})
    assert all(len(row) == len(PROBE_HEADINGS) for row in rows)
    assert rows == [
        ["static", "1.000", "8", "100", "-", "0", "yes"],
        ["static", "2.000", "8", "100", "-", "0", "no, ended early"],
    ]


def test_the_charts_show_every_mode_and_the_rates_when_they_were_looked_for():
    runs = runs_of_two_rounds()
    results = summarize_policies(PLAN, runs)
    probes = {"continuous": [make_probe(2.0, True)], "static": [make_probe(1.0, False)]}
    assert len(policy_panels(PLAN, results, runs, {})) == 4
    panels = policy_panels(PLAN, results, runs, probes)
    assert len(panels) == 5
    text = draw_figure("t", panels)
    ElementTree.fromstring(text)
    assert "Time to first token: exponential, burst" in text
    assert "continuous" in text


def test_the_document_can_be_written():
    runs = [make_run("continuous", 2.0, failed=True), make_run("static", 4.0)]
    probes = {"static": [make_probe(1.0, True)]}
    document = policy_document(summarize_policies(PLAN, runs), runs, probes)
    written = orjson.loads(orjson.dumps(document))
    assert written["workloads"][0]["gains"] == {"static": 2.0}
    assert written["runs"][0]["counters"]["busy_s"] == 1.0
    assert written["runs"][0]["summary"]["errors"] == {"http 500": 1}
    assert written["objective"]["static"]["highest_rate"] == 1.0
