"""Demands, and whether they were met."""

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console

__all__ = ["Verdict", "judge", "print_verdicts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A demand, and what was measured.

    Attributes:
        demand: in words, with its figure.
        measured: the figure; None if it could not be measured.
        is_met: whether it holds.
    """

    demand: str
    measured: float | None
    is_met: bool


def judge(
    demand: str, measured: float | None, *, most: float | None = None, least: float | None = None
) -> Verdict:
    """Compare a figure with the most that it may be, or the least.

    Args:
        demand: in words.
        measured: None, or not a number, meets no demand.
        most: upper bound, itself allowed.
        least: lower bound, likewise.
    """
    is_met = (
        measured is not None
        and measured == measured
        and (most is None or measured <= most)
        and (least is None or measured >= least)
    )
    return Verdict(demand=demand, measured=measured, is_met=is_met)


def print_verdicts(console: Console, verdicts: Iterable[Verdict]) -> None:
    """A line for each demand."""
    for verdict in verdicts:
        word = "met   " if verdict.is_met else "MISSED"
        figure = "not measured" if verdict.measured is None else f"{verdict.measured:.4g}"
        console.print(f"{word} {verdict.demand}: {figure}", markup=False, highlight=False)
