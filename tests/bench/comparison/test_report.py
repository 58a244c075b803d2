from dataclasses import replace
from xml.etree import ElementTree

from bench.comparison.figures import PeersResult, ProductLimit, SideRun, WorkloadRun
from bench.comparison.golden import GoldenResult
from bench.comparison.plan import PeersPlan
from bench.comparison.report import (
    SIDE_HEADINGS,
    WORKLOAD_HEADINGS,
    failure_lines,
    limit_lines,
    peers_panels,
    side_rows,
    workload_rows,
)
from bench.stream import RequestRecord
from bench.summary import Distribution, LoadLevel, LoadSummary, summarize
from bench.svg import draw_figure

PLAN = PeersPlan(streams=(1, 8))


def distribution(value: float) -> Distribution:
    return Distribution(mean=value, p50=value, p90=value, p99=value + 0.5, max=value + 1)


def summary(rate: float, num_failed: int = 0) -> LoadSummary:
    record = RequestRecord(0, 0.0)
    made = summarize(LoadLevel(concurrency=1), [record], output_len=None, client_cpu_s=0.0)
    return replace(
        made,
        num_requests=4,
        num_failed=num_failed,
        errors={"http 503": num_failed} if num_failed else {},
        error_example="busy" if num_failed else None,
        duration_s=1.0,
        output_tokens=int(rate),
        prompt_tokens=300,
        output_tokens_per_s=rate,
        total_tokens_per_s=rate + 300,
        ttft_ms=distribution(200),
        itl_ms=distribution(20),
    )


def side_run(side: str, rate: float, **fields: object) -> SideRun:
    values = {
        "side": side,
        "round_number": 0,
        "is_cold": True,
        "ready_s": 2.25,
        "peak_memory_bytes": 3 << 20,
        "workloads": [
            WorkloadRun(workload="8 streams", summary=summary(rate)),
            WorkloadRun(workload="prefill", summary=summary(rate)),
        ],
    }
    return SideRun(**{**values, **fields})


def make_result(*runs: SideRun) -> PeersResult:
    return PeersResult(
        sides=[run.side for run in runs],
        workloads=["8 streams", "prefill", "long-prompt"],
        runs=runs,
        limits={0: ProductLimit(bf16_gflops=384, int8_gflops=768, matrix_weights=10**9)},
    )


GOLDEN = GoldenResult(num_cases=12, num_equal=9, num_held=12, tokens_held=1, num_tokens=2)
RESULT = make_result(side_run("headrace", 40, golden=GOLDEN), side_run("vLLM", 25))


def test_a_row_for_each_workload_and_side_with_what_ours_is_over_it():
    rows = workload_rows(RESULT)
    assert rows[:2] == [
        ["8 streams", "headrace", "40.0", "340", "300", "200/200", "20.0/20.5", "4/4", ""],
        ["8 streams", "vLLM", "25.0", "325", "300", "200/200", "20.0/20.5", "4/4", "1.60x"],
    ]
    # Prompts alone are compared by prompt tokens.
    assert [row[0] for row in rows[2:]] == ["prefill", "prefill"]
    assert rows[3][-1] == "1.00x"
    assert {len(row) for row in rows} == {len(WORKLOAD_HEADINGS)}


def test_a_row_for_each_side():
    rows = side_rows(RESULT, PLAN)
    assert rows == [
        ["headrace", "2.2", "-", "3", "62%", "9/12 of 12"],
        ["vLLM", "2.2", "-", "3", "-", "-"],
    ]
    assert {len(row) for row in rows} == {len(SIDE_HEADINGS)}


def test_the_product_limit_is_told_in_tokens():
    # 384 GFLOP are a request of 128 and 64 tokens with 1e9 weights.
    assert limit_lines(RESULT, PLAN) == [
        "product limit, round 1: bf16 384 GFLOP/s, 64 output tok/s; "
        "int8 768 GFLOP/s, 128 output tok/s"
    ]


def test_what_failed_is_said_with_the_last_words():
    runs = [
        WorkloadRun(workload="8 streams", summary=summary(4, num_failed=3)),
        WorkloadRun(workload="prefill", failure="pipeline ended"),
    ]
    result = make_result(
        side_run("headrace", 40),
        side_run("vLLM", 1, workloads=runs, failure="not ready", last_words="\nno such model\n"),
    )
    assert failure_lines(result) == [
        "vLLM, round 1: not ready",
        "vLLM, round 1, 8 streams: 3 of 4 requests failed (http 503: 3); first: busy",
        "vLLM, round 1, prefill: pipeline ended",
        "vLLM, round 1, its last words:\nno such model",
    ]


def test_there_is_a_chart_for_what_was_measured():
    panels = peers_panels(RESULT, PLAN)
    assert [panel.title for panel in panels] == [
        "Output tokens/s, 128 in, 64 out",
        "Time to first token, median, 128 in, 64 out",
        "Time between tokens, median, 128 in, 64 out",
        "Time between tokens, P99, 128 in, 64 out",
        "Prompts alone",
        "P99 ITL of 16 streams beside a long prompt",
        "Time until ready",
    ]
    assert panels[0].groups == ["8 streams"]
    assert panels[0].series == {"headrace": [40], "vLLM": [25]}
    assert panels[-1].series["vLLM"] == [2.25, None]
    ElementTree.fromstring(draw_figure("t", panels))
