"""Two sides measured by turns: the median of what tells them apart, and how sure it is."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["Estimate", "by_turns", "estimate"]

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A median, and between what it lies.

    Attributes:
        median: of the pairs.
        low, high: ends of an interval that holds the true median with at least `confidence`;
            infinite where there are too few pairs for one.
    """

    median: float
    low: float
    high: float
    num_pairs: int
    confidence: float = CONFIDENCE


def by_turns[Side](first: Side, second: Side, num_pairs: int) -> Iterator[tuple[Side, Side]]:
    """Pairs in the order A B, B A, A B, ...: what drifts evenly hits both sides alike."""
    for number in range(num_pairs):
        yield (first, second) if number % 2 == 0 else (second, first)


def estimate(differences: Sequence[float]) -> Estimate:
    """The median of paired differences with an interval that supposes nothing of their kind.

    It lies between two of the sorted values: each value is as likely above the true median as
    below it, so how many are below follows a binomial law. A few wild pairs move neither end far.
    """
    values = sorted(differences)
    count = len(values)
    if not count:
        raise ValueError("an estimate needs at least one pair")
    # The most values that can be left out at each end.
    cut, tail = 0, 0.0
    while (tail := tail + math.comb(count, cut) / 2**count) <= (1 - CONFIDENCE) / 2:
        cut += 1
    return Estimate(
        median=median(values),
        low=values[cut - 1] if cut else -math.inf,
        high=values[-cut] if cut else math.inf,
        num_pairs=count,
    )
