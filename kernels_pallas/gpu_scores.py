"""What becomes of a score before the softmax, in the kernels of both GPU backends."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

__all__ = ["Scoring"]

Ref = Any  # Pallas' references have no public type

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """A sliding window and a soft cap, as of the contract. Known when a kernel is compiled.

    Scores are for base 2: log2(e) times those of the contract.
    """

    sliding_window: int | None = None
    soft_cap: float | None = None

    def query_position(self, splits: Ref, split_starts: Ref, seq: Array, end: Array) -> Array:
        """Return the last position that a decode's split may be asked about.

        With a window that is the query's own, where the last split of its sequence ends. Without
        one, where this split ends is as good: what is after it is in others.
        """
        if self.sliding_window is None:
            return end - 1
        position: Array = splits[split_starts[seq + 1] - 1, 2] - 1
        return position

    def first_visible(self, position: Array) -> Array:
        """Return the first position that the query at `position` sees."""
        if self.sliding_window is None:
            return position * 0  # a constant is not lowered in a program for several devices
        return jnp.maximum(position - self.sliding_window + 1, 0)

    def visible(self, positions: Array, last_positions: Array) -> Array:
        """Return whether each position is seen by a query at that other one, its own."""
        seen = positions <= last_positions
        if self.sliding_window is not None:
            seen = jnp.logical_and(seen, positions > last_positions - self.sliding_window)
        return seen

    def cap(self, scores: Array) -> Array:
        """Return the capped scores.

        tanh is made of exp2 and a division, which are exact to the last bits everywhere: what GPUs
        have for tanh itself is off by 2^-11. Its ends are right too: 2^x may become 0 or infinite.
        """
        if self.soft_cap is None:
            return scores
        cap = self.soft_cap * LOG2_E
        return cap - 2 * cap / (1 + jnp.exp2(scores * (2 / self.soft_cap)))
