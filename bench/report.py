"""Summaries as a table for people and as JSON for later comparison."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.stream import RequestRecord
from bench.summary import Distribution, LoadSummary

__all__ = [
    "make_notes",
    "make_table",
    "milliseconds",
    "open_console",
    "print_rows",
    "print_summaries",
    "record_row",
    "write_json",
]

# Above this share of a core, the client may be what was measured.
BUSY_CLIENT_SHARE = 0.8
FILE_WIDTH = 180


def milliseconds(distribution: Distribution | None, *names: str) -> str:
    """Some of the values of a distribution, for one cell."""
    if distribution is None:
        return "-"
    values = [getattr(distribution, name) for name in names]
    return "/".join(f"{value:.1f}" if value < 100 else f"{value:.0f}" for value in values)


def make_table(summaries: Sequence[LoadSummary]) -> Table:
    """One row for each load level."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True)
    for heading in (
        "load",
        "output\ntok/s",
        "total\ntok/s",
        "req/s",
        "TTFT ms\np50/p99",
        "ITL ms\np50/p99",
        "E2E ms\np50/p99",
        "ok",
    ):
        table.add_column(heading, justify="left" if heading == "load" else "right", overflow="fold")
    for row in summaries:
        table.add_row(
            row.level.name,
            f"{row.output_tokens_per_s:.1f}",
            "-" if row.total_tokens_per_s is None else f"{row.total_tokens_per_s:.1f}",
            f"{row.requests_per_s:.2f}",
            milliseconds(row.ttft_ms, "p50", "p99"),
            milliseconds(row.itl_ms, "p50", "p99"),
            milliseconds(row.e2e_ms, "p50", "p99"),
            f"{row.num_requests - row.num_failed}/{row.num_requests}",
            style="red" if row.num_failed else None,
        )
    return table


def make_notes(summary: LoadSummary) -> list[str]:
    """What a reader of the figures must know about one level."""
    notes = []
    if summary.errors:
        kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(summary.errors.items()))
        notes.append(f"{summary.num_failed} failed ({kinds}); first: {summary.error_example}")
    if summary.short_outputs:
        notes.append(
            f"{summary.short_outputs} answers had another length than asked for "
            "(does the server know ignore_eos?)"
        )
    if summary.cached_tokens:
        notes.append(f"{summary.cached_tokens} prompt tokens came from the server's prefix cache")
    if summary.token_count_method == "chunks":
        notes.append("tokens were counted as chunks with text: the server sends no exact counts")
    if summary.client_cpu_share > BUSY_CLIENT_SHARE:
        notes.append(f"the client itself used {summary.client_cpu_share:.0%} of a core")
    if summary.client_lag_ms is not None and summary.client_lag_ms.p99 > 10:
        notes.append(
            f"requests left up to {summary.client_lag_ms.max:.0f} ms late (client too slow)"
        )
    if summary.goodput_per_s is not None:
        notes.append(f"goodput {summary.goodput_per_s:.2f} req/s")
    return [f"{summary.level.name}: {note}" for note in notes]


def print_summaries(console: Console, summaries: Sequence[LoadSummary]) -> None:
    """Table and notes."""
    console.print(make_table(summaries))
    for summary in summaries:
        for note in make_notes(summary):
            console.print(note, markup=False, highlight=False)


def open_console() -> Console:
    """For results: where the output is no terminal, wide enough for every table of ours."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)


def print_rows(
    console: Console, headings: Sequence[str], rows: Iterable[Sequence[str]], title: str = ""
) -> None:
    """A table whose first column is words and whose others are figures."""
    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="right" if position else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def record_row(record: RequestRecord) -> dict[str, Any]:
    """One request, for JSON."""
    row = {entry.name: getattr(record, entry.name) for entry in fields(record)}
    row["gaps_s"] = list(record.gaps_s)
    row["gap_tokens"] = list(record.gap_tokens)
    return row


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a result, readable and with a stable order of keys; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
