from dataclasses import replace

import pytest

from bench.comparison.figures import (
    METRICS,
    PeersResult,
    ProductLimit,
    SideRun,
    WorkloadRun,
    judge_peers,
)
from bench.comparison.golden import GoldenResult
from bench.comparison.plan import PeersPlan
from bench.stream import RequestRecord
from bench.summary import Distribution, LoadLevel, LoadSummary, summarize


def summary(rate: float, itl_ms: float = 10.0, prompt_rate: float = 100.0) -> LoadSummary:
    """Of a load of ten seconds."""
    made = summarize(
        LoadLevel(concurrency=1), [RequestRecord(0, 0.0)], output_len=None, client_cpu_s=0.0
    )
    return replace(
        made,
        duration_s=10.0,
        output_tokens=int(10 * rate),
        prompt_tokens=int(10 * prompt_rate),
        output_tokens_per_s=rate,
        total_tokens_per_s=rate + prompt_rate,
        itl_ms=distribution(itl_ms),
        ttft_ms=distribution(5 * itl_ms),
    )


def distribution(value: float) -> Distribution:
    return Distribution(mean=value, p50=value, p90=value, p99=2 * value, max=2 * value)


def side_run(side: str, round_number: int = 0, **fields: object) -> SideRun:
    return SideRun(
        **{"side": side, "round_number": round_number, "is_cold": round_number == 0, **fields}
    )


def rates(side: str, round_number: int, **by_workload: float) -> SideRun:
    return side_run(
        side,
        round_number,
        ready_s=4.0,
        workloads=[
            WorkloadRun(workload=name.replace("_", " "), summary=summary(rate))
            for name, rate in by_workload.items()
        ],
    )


def result_of(*runs: SideRun, limits: dict[int, ProductLimit] | None = None) -> PeersResult:
    return PeersResult(
        sides=list(dict.fromkeys(run.side for run in runs)),
        workloads=list(dict.fromkeys(w.workload for run in runs for w in run.workloads)),
        runs=runs,
        limits=limits or {},
    )


def verdicts_of(result: PeersResult, plan: PeersPlan) -> dict[str, tuple[float | None, bool]]:
    return {v.demand: (v.measured, v.is_met) for v in judge_peers(result, plan)}


def test_a_figure_is_the_median_of_the_rounds():
    result = result_of(
        *(rates("headrace", number, x=rate) for number, rate in enumerate((1, 9, 4)))
    )
    assert result.figure("headrace", "x", "output_tokens_per_s") == 4
    assert result.figure("headrace", "y", "output_tokens_per_s") is None


def test_a_ratio_is_made_in_each_round_with_the_best_of_the_peers():
    result = result_of(
        *(rates("headrace", 0, x=100), rates("vLLM", 0, x=50), rates("llama.cpp", 0, x=80)),
        *(rates("headrace", 1, x=90), rates("vLLM", 1, x=45), rates("llama.cpp", 1, x=10)),
    )
    peers = ["vLLM", "llama.cpp"]
    assert result.ratio("x", "output_tokens_per_s", peers, max) == (100 / 80 + 90 / 45) / 2
    assert result.ratio("x", "output_tokens_per_s", peers, min) == (100 / 50 + 90 / 10) / 2


def test_a_round_in_which_a_peer_failed_has_no_ratio():
    result = result_of(
        rates("headrace", 0, x=100),
        rates("headrace", 1, x=100),
        rates("vLLM", 0, x=50),
        side_run("vLLM", 1, failure="gone"),
    )
    assert result.ratio("x", "output_tokens_per_s", ["vLLM"], max) == 2
    assert result.ratio("x", "output_tokens_per_s", ["OpenVINO"], max) is None


def test_a_load_of_which_nothing_was_answered_has_no_figures():
    run = WorkloadRun(workload="x", summary=summary(0))
    assert METRICS["output_tokens_per_s"](run) is None
    assert METRICS["itl_p50_ms"](WorkloadRun(workload="x", failure="gone")) is None


def test_prompts_have_a_rate_of_their_own():
    run = WorkloadRun(workload="prefill", summary=summary(3, prompt_rate=700))
    assert METRICS["prompt_tokens_per_s"](run) == 700
    assert METRICS["total_tokens_per_s"](run) == 703


def test_beside_a_long_prompt_the_streams_are_what_counts():
    run = WorkloadRun(
        workload="long-prompt", summary=summary(1, itl_ms=999), beside_ms=distribution(30)
    )
    assert METRICS["itl_p99_ms"](run) == 60
    assert METRICS["ttft_p50_ms"](run) == 5 * 999  # of the prompt


def test_the_targets_are_judged_against_the_better_server_and_against_openvino():
    workloads = {"1_stream": 1, "8_streams": 200, "32_streams": 400, "exponential": 300}
    theirs = {"1_stream": 1, "8_streams": 100, "32_streams": 201, "exponential": 100}
    result = result_of(
        rates("headrace", 0, **workloads),
        rates("vLLM", 0, **theirs),
        rates("llama.cpp", 0, **dict.fromkeys(theirs, 1)),
        rates("OpenVINO", 0, **{name: 0.95 * rate for name, rate in workloads.items()}),
    )
    best = "the best of vLLM and llama.cpp"
    verdicts = verdicts_of(result, PeersPlan(streams=(1, 8, 32)))
    assert verdicts.pop("cold, ready within 20 s") == (4.0, True)
    assert verdicts == {
        f"output tokens/s at 8 streams: at least 2 times {best}": (2.0, True),
        "output tokens/s at 8 streams: at least 0.9 times OpenVINO": (
            pytest.approx(1 / 0.95),
            True,
        ),
        f"output tokens/s at 32 streams: at least 2 times {best}": (400 / 201, False),
        "output tokens/s at 32 streams: at least 1 times OpenVINO": (
            pytest.approx(1 / 0.95),
            True,
        ),
        f"output tokens/s with exponential lengths: at least 2 times {best}": (3.0, True),
        "output tokens/s with exponential lengths: at least 1 times OpenVINO": (
            pytest.approx(1 / 0.95),
            True,
        ),
        f"median ITL at 1 stream: at most 1 times {best}": (1.0, True),
    }


def test_the_streams_beside_a_long_prompt_may_wait_a_third_of_the_peers_time():
    def beside(side: str, itl_ms: float) -> SideRun:
        run = WorkloadRun(
            workload="long-prompt", summary=summary(1), beside_ms=distribution(itl_ms)
        )
        return side_run(side, workloads=[run])

    plan = PeersPlan(kinds=("long-prompt",))
    demand = "P99 ITL beside a long prompt: at most 0.333 times vLLM"
    result = result_of(beside("headrace", 10), beside("vLLM", 31))
    assert verdicts_of(result, plan)[demand] == (pytest.approx(10 / 31), True)
    result = result_of(beside("headrace", 10), beside("vLLM", 29))
    assert verdicts_of(result, plan)[demand][1] is False


def test_a_peer_that_failed_leaves_a_demand_unmet_and_one_that_is_absent_none():
    result = result_of(rates("headrace", 0, **{"8_streams": 10}), side_run("vLLM", failure="x"))
    verdicts = verdicts_of(result, PeersPlan(streams=(8,)))
    assert verdicts["output tokens/s at 8 streams: at least 2 times vLLM"] == (None, False)
    assert not any("OpenVINO" in demand for demand in verdicts)


def test_starts_are_judged_cold_and_warm():
    result = result_of(
        side_run("headrace", 0, ready_s=21.0),
        side_run("headrace", 1, ready_s=3.0),
        side_run("headrace", 2, ready_s=4.0),
    )
    verdicts = verdicts_of(result, PeersPlan())
    assert verdicts["cold, ready within 20 s"] == (21.0, False)
    assert verdicts["warm, ready within 5 s"] == (3.5, True)


def test_the_share_of_the_product_limit_is_that_of_the_most_streams():
    # 1e9 weights, 128 and 64 tokens: 384 GFLOP a request; at 384 GFLOP/s 64 tokens a second.
    limits = {0: ProductLimit(bf16_gflops=384, int8_gflops=768, matrix_weights=10**9)}
    result = result_of(
        rates("headrace", 0, **{"1_stream": 60, "8_streams": 48}),
        rates("headrace int8", 0, **{"1_stream": 60, "8_streams": 64}),
        limits=limits,
    )
    plan = PeersPlan(streams=(1, 8))
    assert result.limit_share("headrace", plan) == pytest.approx(0.75)
    assert result.limit_share("headrace int8", plan) == pytest.approx(0.5)
    verdicts = verdicts_of(result, plan)
    assert verdicts["headrace: at least 75% of the product limit"][1] is True
    assert verdicts["headrace int8: at least 60% of the product limit"][1] is False


def test_golden_answers_must_hold_with_bfloat16():
    def golden(num_held: int) -> GoldenResult:
        return GoldenResult(
            num_cases=4, num_equal=1, num_held=num_held, tokens_held=9, num_tokens=20
        )

    result = result_of(
        side_run("headrace", golden=golden(4)), side_run("headrace int8", golden=golden(2))
    )
    demand = "share of golden answers that hold in bfloat16"
    assert verdicts_of(result, PeersPlan())[demand] == (1.0, True)
    result = result_of(side_run("headrace", golden=golden(3)))
    assert verdicts_of(result, PeersPlan())[demand] == (0.75, False)


def test_memory_is_the_most_of_all_rounds():
    result = result_of(
        side_run("vLLM", 0, peak_memory_bytes=5),
        side_run("vLLM", 1, peak_memory_bytes=7),
        side_run("headrace"),
    )
    assert result.peak_memory_bytes("vLLM") == 7
    assert result.peak_memory_bytes("headrace") is None


def test_the_document_has_medians_ratios_and_every_run():
    document = result_of(rates("headrace", 0, x=10), rates("vLLM", 0, x=4)).as_dict()
    assert document["figures"]["vLLM"]["x"]["output_tokens_per_s"] == 4
    assert document["headrace_over"]["vLLM"]["x"]["output_tokens_per_s"] == 2.5
    assert "headrace" not in document["headrace_over"]
    assert [run["side"] for run in document["runs"]] == ["headrace", "vLLM"]
    assert document["runs"][0]["workloads"][0]["summary"]["output_tokens_per_s"] == 10
