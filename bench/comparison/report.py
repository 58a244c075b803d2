"""The comparison with peers as tables and charts."""

from collections.abc import Sequence

from bench.comparison.figures import MetricName, PeersResult
from bench.comparison.plan import PeersPlan, stream_name
from bench.comparison.sides import HEADRACE, HEADRACE_INT8
from bench.svg import BarPanel

__all__ = [
    "SIDE_HEADINGS",
    "WORKLOAD_HEADINGS",
    "failure_lines",
    "limit_lines",
    "peers_panels",
    "side_rows",
    "workload_rows",
]

WORKLOAD_HEADINGS = (
    *("workload", "side", "output\ntok/s", "total\ntok/s", "prompt\ntok/s"),
    *("TTFT ms\np50/p99", "ITL ms\np50/p99", "ok", "headrace\nover it"),
)
SIDE_HEADINGS = (
    *("side", "ready s\ncold", "ready s\nwarm", "peak\nMiB", "of the product\nlimit"),
    "golden answers\nequal/held",
)
# What the last column of a workload compares; of all others, output tokens per second.
COMPARED: dict[str, MetricName] = {
    "prefill": "prompt_tokens_per_s",
    "long-prompt": "itl_p99_ms",
}


def workload_rows(result: PeersResult) -> list[list[str]]:
    """For the table of WORKLOAD_HEADINGS."""
    rows = []
    for workload in result.workloads:
        compared = COMPARED.get(workload, "output_tokens_per_s")
        for side in result.sides:
            count = count_requests(result, side, workload)
            if count is None:
                continue
            figures = {
                metric: show(result.figure(side, workload, metric))
                for metric in (
                    *("output_tokens_per_s", "total_tokens_per_s", "prompt_tokens_per_s"),
                    *("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"),
                )
            }
            ratio = None if side == HEADRACE else result.ratio(workload, compared, [side], max)
            rows.append(
                [
                    *(workload, side),
                    figures["output_tokens_per_s"],
                    figures["total_tokens_per_s"],
                    figures["prompt_tokens_per_s"],
                    f"{figures['ttft_p50_ms']}/{figures['ttft_p99_ms']}",
                    f"{figures['itl_p50_ms']}/{figures['itl_p99_ms']}",
                    f"{count[0]}/{count[1]}",
                    "" if ratio is None else f"{ratio:.2f}x",
                ]
            )
    return rows


def count_requests(result: PeersResult, side: str, workload: str) -> tuple[int, int] | None:
    """How many requests were answered and sent; None if the side did not get the workload."""
    runs = [
        entry
        for run in result.runs_of(side)
        for entry in run.workloads
        if entry.workload == workload
    ]
    if not runs:
        return None
    summaries = [entry.summary for entry in runs if entry.summary is not None]
    sent = sum(summary.num_requests for summary in summaries)
    return sent - sum(summary.num_failed for summary in summaries), sent


def side_rows(result: PeersResult, plan: PeersPlan) -> list[list[str]]:
    """For the table of SIDE_HEADINGS."""
    rows = []
    for side in result.sides:
        memory = result.peak_memory_bytes(side)
        share = result.limit_share(side, plan) if side in (HEADRACE, HEADRACE_INT8) else None
        golden = next((run.golden for run in result.runs_of(side) if run.golden), None)
        rows.append(
            [
                side,
                show(result.ready_s(side, is_cold=True)),
                show(result.ready_s(side, is_cold=False)),
                "-" if memory is None else f"{memory / 2**20:.0f}",
                "-" if share is None else f"{share:.0%}",
                "-"
                if golden is None
                else f"{golden.num_equal}/{golden.num_held} of {golden.num_cases}",
            ]
        )
    return rows


def limit_lines(result: PeersResult, plan: PeersPlan) -> list[str]:
    """The product limit of each round."""
    lines = []
    for number, limit in result.limits.items():
        rates = {"bf16": limit.bf16_gflops, "int8": limit.int8_gflops}
        parts = [
            f"{name} {gflops:.0f} GFLOP/s, "
            f"{limit.output_tokens_per_s(gflops, plan.input_len, plan.output_len):.0f} output tok/s"
            for name, gflops in rates.items()
        ]
        lines.append(f"product limit, round {number + 1}: {'; '.join(parts)}")
    return lines


def failure_lines(result: PeersResult) -> list[str]:
    """What went wrong on which side, with its last words."""
    lines = []
    for run in result.runs:
        where = f"{run.side}, round {run.round_number + 1}"
        if run.failure:
            lines.append(f"{where}: {run.failure}")
        for entry in run.workloads:
            if entry.failure:
                lines.append(f"{where}, {entry.workload}: {entry.failure}")
            elif entry.summary is not None and entry.summary.num_failed:
                kinds = ", ".join(
                    f"{kind}: {count}" for kind, count in sorted(entry.summary.errors.items())
                )
                lines.append(
                    f"{where}, {entry.workload}: {entry.summary.num_failed} of "
                    f"{entry.summary.num_requests} requests failed ({kinds}); "
                    f"first: {entry.summary.error_example}"
                )
        if run.last_words:
            lines.append(f"{where}, its last words:\n{run.last_words.strip()}")
    return lines


def peers_panels(result: PeersResult, plan: PeersPlan) -> list[BarPanel]:
    """Charts of what was measured."""
    counts = [count for count in plan.streams if stream_name(count) in result.workloads]
    streams = [stream_name(count) for count in counts]
    titles = (
        ("Output tokens/s", "output_tokens_per_s", "tokens/s"),
        ("Time to first token, median", "ttft_p50_ms", "ms"),
        ("Time between tokens, median", "itl_p50_ms", "ms"),
        ("Time between tokens, P99", "itl_p99_ms", "ms"),
    )
    panels = [
        panel(result, f"{title}, {plan.input_len} in, {plan.output_len} out", metric, unit, streams)
        for title, metric, unit in titles
        if streams
    ]
    mixed = [name for name in ("exponential", "prefix", "open") if name in result.workloads]
    if mixed:
        panels.append(
            panel(result, "Output tokens/s, other loads", "output_tokens_per_s", "tokens/s", mixed)
        )
    if "prefill" in result.workloads:
        panels.append(
            panel(result, "Prompts alone", "prompt_tokens_per_s", "tokens/s", ["prefill"])
        )
    if "long-prompt" in result.workloads:
        title = f"P99 ITL of {plan.disturbed_streams} streams beside a long prompt"
        panels.append(panel(result, title, "itl_p99_ms", "ms", ["long-prompt"]))
    panels.append(
        BarPanel(
            title="Time until ready",
            y_label="s",
            groups=["cold", "warm"],
            series={
                side: [result.ready_s(side, is_cold=is_cold) for is_cold in (True, False)]
                for side in result.sides
            },
        )
    )
    return panels


def panel(
    result: PeersResult, title: str, metric: MetricName, unit: str, workloads: Sequence[str]
) -> BarPanel:
    """Bars of one metric: a group for each workload, a bar for each side."""
    return BarPanel(
        title=title,
        y_label=unit,
        groups=workloads,
        series={
            side: [result.figure(side, workload, metric) for workload in workloads]
            for side in result.sides
        },
    )


def show(value: float | None) -> str:
    """A figure for one cell."""
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
