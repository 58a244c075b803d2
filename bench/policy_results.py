"""What the comparison of batching policies found: figures, tables, charts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal, get_args

from bench.lengths import Potential
from bench.objective import Probe, highest_rate
from bench.policy_plan import PolicyPlan, Workload
from bench.scenario import ScenarioRun
from bench.stream import RequestRecord
from bench.summary import Distribution
from bench.svg import BarPanel, LinePanel, distribution_points
from bench.verdict import Verdict, judge

__all__ = [
    "MODES",
    "PROBE_HEADINGS",
    "ROW_HEADINGS",
    "Mode",
    "PolicyRun",
    "ideal_lines",
    "objective_verdicts",
    "policy_document",
    "policy_panels",
    "policy_rows",
    "policy_verdicts",
    "probe_rows",
    "summarize_policies",
]

Mode = Literal["continuous", "dynamic", "static"]
MODES: tuple[Mode, ...] = get_args(Mode)
CAUSES = ("bucket", "prompt_padding", "finished_row")

ROW_HEADINGS = (
    *("workload", "batching", "output\ntok/s", "req/s", "TTFT s\np50/p99", "ITL ms\np50/p99"),
    *("E2E s\np50/p99", "device\nbusy", "wasted slots %\nbucket/prompt/row", "tok/s over\nstatic"),
)
PROBE_HEADINGS = ("batching", "req/s", "requests", "TTFT ms p99", "ITL ms p99", "failed", "holds")

# What continuous batching has to reach.
IDEAL_SHARE = 0.75
RATE_RATIOS: dict[Mode, float] = {"static": 5.0, "dynamic": 2.0}


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """One workload through one mode once.

    Attributes:
        rate: of the Poisson arrivals.
        round_number: which repetition.
    """

    mode: Mode
    workload: Workload
    rate: float | None
    round_number: int
    run: ScenarioRun


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeFigures:
    """A mode on a workload: the median of each figure over the rounds.

    Attributes:
        busy_share: of the time, the engine had a step in flight.
        wasted_shares: of all token slots that were computed, by cause.
    """

    output_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Distribution
    itl_ms: Distribution
    e2e_ms: Distribution
    busy_share: float
    wasted_shares: dict[str, float]
    preemptions: float
    num_failed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadResult:
    """All modes on one workload.

    Attributes:
        rate: of the Poisson arrivals.
        mean_output, longest_output: tokens.
        gains: output tokens per second of continuous batching over each other mode: the median of
            the rounds' ratios.
        reached_share: of the ideal gain over static batching; None without both modes.
        finite_share: likewise of the gain that is possible when the requests run out.
    """

    workload: Workload
    rate: float | None
    num_requests: int
    mean_output: float
    longest_output: int
    potential: Potential
    modes: dict[Mode, ModeFigures]
    gains: dict[Mode, float]
    reached_share: float | None
    finite_share: float | None


def summarize_policies(plan: PolicyPlan, runs: Sequence[PolicyRun]) -> list[WorkloadResult]:
    """The result of each workload, in order."""
    results = []
    for workload in plan.workloads():
        by_mode: dict[Mode, list[PolicyRun]] = {
            mode: [run for run in runs if run.mode == mode and run.workload == workload]
            for mode in MODES
        }
        by_mode = {mode: found for mode, found in by_mode.items() if found}
        potential = plan.potential(workload.lengths)
        output_lens = plan.output_lens(workload.lengths)
        gains = find_gains(by_mode)
        gain = gains.get("static")
        results.append(
            WorkloadResult(
                workload=workload,
                rate=next((run.rate for found in by_mode.values() for run in found), None),
                num_requests=plan.num_requests,
                mean_output=sum(output_lens) / len(output_lens),
                longest_output=max(output_lens),
                potential=potential,
                modes={mode: mode_figures(found) for mode, found in by_mode.items()},
                gains=gains,
                reached_share=None if gain is None else gain / potential.ideal_ratio,
                finite_share=None if gain is None else gain / potential.finite_ratio,
            )
        )
    return results


def find_gains(by_mode: Mapping[Mode, Sequence[PolicyRun]]) -> dict[Mode, float]:
    """Throughput of continuous batching over that of each other mode, round by round."""
    ours = by_mode.get("continuous", ())
    ratios = {
        mode: [
            speed(our_run) / speed(their_run)
            for our_run, their_run in zip(ours, theirs, strict=True)
            if speed(their_run)
        ]
        for mode, theirs in by_mode.items()
        if mode != "continuous" and ours
    }
    return {mode: median(found) for mode, found in ratios.items() if found}


def speed(run: PolicyRun) -> float:
    """Output tokens per second."""
    return run.run.summary.output_tokens_per_s


def mode_figures(runs: Sequence[PolicyRun]) -> ModeFigures:
    """The medians over the rounds."""
    scenario_runs = [run.run for run in runs]
    summaries = [run.summary for run in scenario_runs]
    shares = [run.counters.wasted_shares() for run in scenario_runs]
    return ModeFigures(
        output_tokens_per_s=median(summary.output_tokens_per_s for summary in summaries),
        requests_per_s=median(summary.requests_per_s for summary in summaries),
        ttft_ms=median_distribution(summary.ttft_ms for summary in summaries),
        itl_ms=median_distribution(summary.itl_ms for summary in summaries),
        e2e_ms=median_distribution(summary.e2e_ms for summary in summaries),
        busy_share=median(run.busy_share for run in scenario_runs),
        wasted_shares={
            cause: median(share.get(cause, 0.0) for share in shares)
            for cause in (*CAUSES, *sorted({name for share in shares for name in share}))
        },
        preemptions=median(run.counters.preemptions for run in scenario_runs),
        num_failed=sum(summary.num_failed for summary in summaries),
    )


def median_distribution(distributions: Iterable[Distribution | None]) -> Distribution:
    """The median of each value; not a number where nothing was measured."""
    known = [asdict(entry) for entry in distributions if entry is not None]
    return Distribution(
        **{
            name: median([entry[name] for entry in known] or [float("nan")])
            for name in Distribution.__slots__
        }
    )


def policy_rows(results: Iterable[WorkloadResult]) -> list[list[str]]:
    """For the table of ROW_HEADINGS."""
    rows = []
    for result in results:
        static = result.modes.get("static")
        for mode, figures in result.modes.items():
            base = static.output_tokens_per_s if static else 0.0
            gain = figures.output_tokens_per_s / base if base else None
            rate = "" if result.rate is None else f" {result.rate:.3g}/s"
            rows.append(
                [
                    f"{result.workload.name}{rate}",
                    mode,
                    f"{figures.output_tokens_per_s:.1f}",
                    f"{figures.requests_per_s:.2f}",
                    f"{figures.ttft_ms.p50 / 1e3:.2f}/{figures.ttft_ms.p99 / 1e3:.2f}",
                    f"{figures.itl_ms.p50:.1f}/{figures.itl_ms.p99:.1f}",
                    f"{figures.e2e_ms.p50 / 1e3:.2f}/{figures.e2e_ms.p99 / 1e3:.2f}",
                    f"{figures.busy_share:.0%}",
                    "/".join(f"{100 * figures.wasted_shares[cause]:.1f}" for cause in CAUSES),
                    "-" if gain is None else f"{gain:.2f}x",
                ]
            )
    return rows


def ideal_lines(results: Iterable[WorkloadResult]) -> list[str]:
    """What the gain over static batching is against what it could be, a line for each burst."""
    return [
        f"{result.workload.name}: continuous over static {result.gains['static']:.2f}x; ideal "
        f"{result.potential.ideal_ratio:.2f}x (mean longest of a batch over mean output), reached "
        f"{result.reached_share:.0%}; with the end of this workload, where rows run empty, "
        f"{result.potential.finite_ratio:.2f}x, reached {result.finite_share:.0%}"
        for result in results
        if result.workload.arrivals == "burst" and result.reached_share is not None
    ]


def policy_verdicts(results: Iterable[WorkloadResult]) -> list[Verdict]:
    """Whether the gain on exponential lengths is as large as it should be."""
    return [
        judge(
            f"at least {IDEAL_SHARE:.0%} of the ideal gain over static ({result.workload.name})",
            result.reached_share,
            least=IDEAL_SHARE,
        )
        for result in results
        if result.workload == Workload(lengths="exponential", arrivals="burst")
        and "static" in result.gains
    ]


def probe_rows(probes: Mapping[Mode, Sequence[Probe]]) -> list[list[str]]:
    """For the table of PROBE_HEADINGS: every rate that was tried."""
    return [
        [
            mode,
            f"{probe.rate:.3f}",
            str(probe.num_requests),
            "-" if probe.ttft_p99_ms is None else f"{probe.ttft_p99_ms:.0f}",
            "-" if probe.itl_p99_ms is None else f"{probe.itl_p99_ms:.1f}",
            str(probe.num_failed),
            "yes" if probe.holds else "no, ended early" if probe.ended_early else "no",
        ]
        for mode, tried in probes.items()
        for probe in sorted(tried, key=lambda probe: probe.rate)
    ]


def objective_verdicts(probes: Mapping[Mode, Sequence[Probe]]) -> list[Verdict]:
    """Whether continuous batching keeps the objective at enough times the rate of the others.

    Where another mode keeps it at no rate that was tried, the ratio has no upper bound.
    """
    ours = highest_rate(probes.get("continuous", ()))
    verdicts = []
    for mode, least in RATE_RATIOS.items():
        if mode not in probes:
            continue
        theirs = highest_rate(probes[mode])
        ratio = None if ours is None else float("inf") if theirs is None else ours / theirs
        demand = f"at the objective, at least {least:g} times the request rate of {mode}"
        verdicts.append(judge(demand, ratio, least=least))
    return verdicts


def policy_panels(
    plan: PolicyPlan,
    results: Sequence[WorkloadResult],
    runs: Sequence[PolicyRun],
    probes: Mapping[Mode, Sequence[Probe]],
) -> list[BarPanel | LinePanel]:
    """Throughput and waste as bars, latencies as distributions, rates at the objective as bars."""
    names = [result.workload.name for result in results]

    def bars(title: str, y_label: str, value: Callable[[ModeFigures], float]) -> BarPanel:
        series: dict[str, list[float | None]] = {
            mode: [
                value(result.modes[mode]) if mode in result.modes else None for result in results
            ]
            for mode in MODES
        }
        return BarPanel(title=title, y_label=y_label, groups=names, series=series)

    panels: list[BarPanel | LinePanel] = [
        bars("Throughput", "output tokens per second", lambda f: f.output_tokens_per_s),
        bars(
            "Wasted token slots",
            "% of all computed slots",
            lambda figures: 100 * sum(figures.wasted_shares.values()),
        ),
    ]
    for workload in plan.workloads():
        for title, x_label, value in (
            ("Time to first token", "seconds", first_token_of),
            ("End-to-end time", "seconds", end_of),
        ):
            panels.append(
                LinePanel(
                    title=f"{title}: {workload.name}",
                    x_label=x_label,
                    y_label="% of requests",
                    log_x=True,
                    series={
                        mode: distribution_points(values)
                        for mode in MODES
                        if (values := pooled(runs, mode, workload, value))
                    },
                )
            )
    if probes:
        rates: dict[str, list[float | None]] = {
            mode: [highest_rate(tried)] for mode, tried in probes.items()
        }
        panels.append(
            BarPanel(
                title="Highest rate that keeps the objective",
                y_label="requests per second",
                groups=["objective"],
                series=rates,
            )
        )
    return panels


def first_token_of(record: RequestRecord) -> float | None:
    """Seconds until the first token."""
    return record.first_token_s


def end_of(record: RequestRecord) -> float | None:
    """Seconds until the end."""
    return record.end_s


def pooled(
    runs: Iterable[PolicyRun],
    mode: Mode,
    workload: Workload,
    value: Callable[[RequestRecord], float | None],
) -> list[float]:
    """A value of every answered request over all rounds."""
    return [
        seconds
        for run in runs
        if run.mode == mode and run.workload == workload
        for record in run.run.records
        if record.error is None and (seconds := value(record)) is not None
    ]


def policy_document(
    results: Iterable[WorkloadResult],
    runs: Iterable[PolicyRun],
    probes: Mapping[Mode, Sequence[Probe]],
) -> dict[str, Any]:
    """For JSON."""
    return {
        "workloads": [asdict(result) for result in results],
        "runs": [
            {
                "mode": run.mode,
                "workload": asdict(run.workload),
                "request_rate": run.rate,
                "round": run.round_number,
                "summary": run.run.summary.as_dict(),
                "counters": asdict(run.run.counters),
            }
            for run in runs
        ],
        "objective": {
            mode: {
                "highest_rate": highest_rate(tried),
                "probes": [asdict(probe) for probe in tried],
            }
            for mode, tried in probes.items()
        },
    }
