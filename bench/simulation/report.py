"""Simulated runs as a table, as JSON, and as a plot."""

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench.report import milliseconds
from bench.simulation.plan import RunResult
from bench.simulation.validation import Comparison, RunFigures
from bench.svg import BarPanel, LinePanel, draw_figure

__all__ = ["draw_runs", "fleet_notes", "make_comparison_table", "make_runs_tables", "run_dict"]


def letters_of(results: Sequence[RunResult]) -> dict[str, str]:
    """A letter for each fleet, by name; there are none for those beyond Z."""
    names = dict.fromkeys(result.name for result in results)
    return dict(zip(names, string.ascii_uppercase, strict=False))


def fleet_notes(results: Sequence[RunResult]) -> list[str]:
    """What the letters stand for."""
    return [f"{letter}: {name}" for name, letter in letters_of(results).items()]


def make_runs_tables(results: Sequence[RunResult]) -> list[Table]:
    """How fast, and why: one row for each run. What no run has gets no column."""
    letters = letters_of(results)
    runs = {
        "": [letters.get(result.name, result.name) for result in results],
        "req/s per\nreplica": [f"{result.variant.rate_per_replica:g}" for result in results],
    }
    speed = {
        "output\ntok/s": [f"{r.figures.output_tokens_per_s:.0f}" for r in results],
        "done\nreq/s": [f"{r.figures.requests_per_s:.1f}" for r in results],
        "good\n%": [percent(r.figures.goodput_share) for r in results],
        "TTFT ms\np50/p99": [milliseconds(r.figures.ttft_ms, "p50", "p99") for r in results],
        "ITL ms\np50/p99": [milliseconds(r.figures.itl_ms, "p50", "p99") for r in results],
        "E2E s\np50/p99": [seconds(r) for r in results],
        "TTFT p99\nheavy": [number(r.figures.heavy_ttft_p99_ms) for r in results],
        "light": [number(light_ms(r)) for r in results],
        "urgent": [number(r.figures.urgent_ttft_p99_ms) for r in results],
    }
    causes = {
        "queue ms\np99": [milliseconds(r.figures.queue_ms, "p99") for r in results],
        "seqs": [f"{r.figures.mean_seqs:.0f}" for r in results],
        "busy\n%": [percent(r.figures.busy_share) for r in results],
        "KV %\nmean/max": [
            f"{percent(r.figures.kv_use_mean)}/{percent(r.figures.kv_use_max)}" for r in results
        ],
        "pre-\nempted %": [percent(r.figures.preemption_share, digits=1) for r in results],
        "prefix\nhits %": [percent(r.figures.prefix_hit_rate) for r in results],
        "wasted\nslots %": [percent(r.figures.wasted_share) for r in results],
        "busiest\n/ mean": [f"{r.figures.imbalance:.2f}" for r in results],
        "timed\nout": [count(r.figures.num_timed_out) for r in results],
    }
    return [make_table(runs | speed), make_table(runs | causes)]


def make_table(columns: Mapping[str, Sequence[str]]) -> Table:
    """A table of the columns that hold anything."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True)
    shown = {heading: cells for heading, cells in columns.items() if set(cells) != {"-"}}
    for heading in shown:
        table.add_column(heading, justify="right" if heading else "left")
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    return table


def light_ms(result: RunResult) -> float | None:
    """Of all tenants but the heavy one, where there is one."""
    if result.figures.heavy_ttft_p99_ms is None:
        return None
    return result.figures.light_ttft_p99_ms


def percent(share: float | None, *, digits: int = 0) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def count(value: int) -> str:
    return str(value) if value else "-"


def seconds(result: RunResult) -> str:
    e2e_ms = result.figures.e2e_ms
    return "-" if e2e_ms is None else f"{e2e_ms.p50 / 1e3:.1f}/{e2e_ms.p99 / 1e3:.1f}"


def make_comparison_table(comparison: Comparison) -> Table:
    """A recorded run beside its simulation."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for heading in ("", "measured", "simulated", "error"):
        table.add_column(heading, justify="right" if heading else "left")
    for label, attribute in (
        ("output tok/s", "output_tokens_per_s"),
        ("duration s", "duration_s"),
        ("steps", "num_steps"),
        ("mean step ms", "mean_step_ms"),
        ("mean ITL ms", "mean_itl_ms"),
    ):
        measured, simulated = (figure(run, attribute) for run in comparison_pair(comparison))
        error = f"{100 * (simulated / measured - 1):+.1f} %" if measured else "-"
        table.add_row(label, f"{measured:.4g}", f"{simulated:.4g}", error)
    return table


def comparison_pair(comparison: Comparison) -> tuple[RunFigures, RunFigures]:
    return comparison.measured, comparison.simulated


def figure(run: RunFigures, attribute: str) -> float:
    return float(getattr(run, attribute))


def run_dict(result: RunResult) -> dict[str, Any]:
    """A run for JSON."""
    document = asdict(result)
    if math.isinf(result.variant.rate_per_replica):
        document["variant"]["rate_per_replica"] = None
    return document


def draw_runs(title: str, results: Sequence[RunResult]) -> str:
    """An SVG: lines over the rate where there are several, else a bar for each run."""
    letters = letters_of(results)
    rates = {result.variant.rate_per_replica for result in results}
    panels = line_panels if len(rates) > 1 else bar_panels
    return draw_figure(title, panels(results, letters), notes=fleet_notes(results))


def measures(result: RunResult) -> dict[str, tuple[str, float | None]]:
    """What is plotted: panel title to unit and value."""
    figures = result.figures
    good = figures.goodput_share
    return {
        "Output": ("tokens/s", figures.output_tokens_per_s),
        "Time to first token, p99": ("ms", figures.ttft_ms.p99 if figures.ttft_ms else None),
        "Time between tokens, p99": ("ms", figures.itl_ms.p99 if figures.itl_ms else None),
        "Requests within the objective": ("%", None if good is None else 100 * good),
        "Prompt tokens from the prefix cache": ("%", 100 * figures.prefix_hit_rate),
        "Busiest replica over the mean": ("ratio", figures.imbalance),
    }


def line_panels(results: Sequence[RunResult], letters: Mapping[str, str]) -> list[LinePanel]:
    """One panel for each measure, one line for each fleet."""
    panels = []
    for title, (unit, _) in measures(results[0]).items():
        series: dict[str, list[tuple[float, float]]] = {}
        for result in sorted(results, key=lambda result: result.variant.rate_per_replica):
            rate, value = result.variant.rate_per_replica, measures(result)[title][1]
            if value is not None and result.name in letters and math.isfinite(rate):
                series.setdefault(letters[result.name], []).append((rate, value))
        if series:
            panels.append(
                LinePanel(
                    title=title, x_label="requests/s per replica", y_label=unit, series=series
                )
            )
    return panels


def bar_panels(results: Sequence[RunResult], letters: Mapping[str, str]) -> list[BarPanel]:
    """One panel for each measure, one bar for each fleet."""
    shown = [result for result in results if result.name in letters]
    panels = []
    for title, (unit, _) in measures(results[0]).items():
        values = [measures(result)[title][1] for result in shown]
        if any(value is not None for value in values):
            panels.append(
                BarPanel(
                    title=title,
                    y_label=unit,
                    groups=[letters[result.name] for result in shown],
                    series={unit: values},
                )
            )
    return panels
