"""Seeded output lengths, and what continuous batching could at best gain on them.

Counted in decode steps, all rows full, prompts free: a static batch takes as many steps as its
longest output; continuous batching takes as many as there are tokens, over the number of rows.
"""

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import batched
from statistics import fmean
from typing import Literal, get_args

__all__ = [
    "LengthConfig",
    "LengthKind",
    "Potential",
    "draw_lengths",
    "find_potential",
]

LengthKind = Literal["uniform", "exponential"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthConfig:
    """How long outputs are.

    Attributes:
        kind: "uniform" draws from 1 to twice the mean, less one; "exponential" as memoryless
            answers would end.
        mean: before the cap, in tokens.
        cap: no output is longer.
    """

    kind: LengthKind
    mean: int
    cap: int

    def __post_init__(self) -> None:
        if self.kind not in get_args(LengthKind):
            raise ValueError(f"{self.kind=} must be one of {', '.join(get_args(LengthKind))}")
        if not 1 <= self.mean <= self.cap:
            raise ValueError(f"{self.mean=} must be at least 1 and at most {self.cap=}")


def draw_lengths(config: LengthConfig, count: int, seed: int) -> list[int]:
    """The lengths of `count` outputs; the same seed gives the same ones."""
    source = random.Random(f"{seed}/{config.kind}")
    if config.kind == "uniform":
        drawn = [source.randint(1, 2 * config.mean - 1) for _ in range(count)]
    else:
        drawn = [math.ceil(source.expovariate(1 / config.mean)) for _ in range(count)]
    return [min(max(length, 1), config.cap) for length in drawn]


def static_steps(lengths: Sequence[int], batch_size: int) -> int:
    """Decode steps of batches in order, each as long as its longest output."""
    return sum(max(batch) for batch in batched(lengths, batch_size))


def continuous_steps(lengths: Sequence[int], num_rows: int) -> int:
    """Decode steps when a row that becomes free takes the next output at once."""
    free_at = [0] * num_rows
    for length in lengths:
        heapq.heapreplace(free_at, free_at[0] + length)
    return max(free_at)


@dataclass(frozen=True, kw_only=True, slots=True)
class Potential:
    """What continuous batching could gain over static batching on given lengths.

    Attributes:
        ideal_ratio: mean over the batches of their longest output, over the mean output: the gain
            while there is always another request to join.
        finite_ratio: the gain when the requests also run out: the last rows stay empty.
    """

    ideal_ratio: float
    finite_ratio: float


def find_potential(lengths: Sequence[int], batch_size: int) -> Potential:
    """The potential of a workload.

    Args:
        lengths: of the outputs, in order of arrival; full batches only.
        batch_size: requests of a static batch, and rows of continuous batching.

    Raises:
        ValueError: the last batch would not be full.
    """
    if not lengths or len(lengths) % batch_size:
        raise ValueError(f"{len(lengths)} requests do not fill batches of {batch_size}")
    num_batches = len(lengths) // batch_size
    steps = static_steps(lengths, batch_size)
    return Potential(
        ideal_ratio=steps / num_batches / fmean(lengths),
        finite_ratio=steps / continuous_steps(lengths, batch_size),
    )
