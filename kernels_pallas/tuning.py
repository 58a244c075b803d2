"""How large the pieces are that the GPU kernels work in: one table, compiled whole by the tests.

A larger tile reads more ahead and needs more registers and shared memory. No entry may spill, and
every one fits into what the smallest supported GPU, an L4, gives one block of threads. The order
of speed is estimated, not measured: `python -m bench.gpu` ranks `triton_candidates` on a GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Phase", "TritonConfig", "triton_candidates", "triton_config"]

Phase = Literal["decode", "prefill"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonConfig:
    """Sizes of a kernel of the Triton backend.

    Attributes:
        rows: left rows of the products, query heads that share a kv head times queries.
        tile: context tokens per round of the online softmax; divides SPLIT_MULTIPLE.
        num_warps: warps that share the work.
        num_stages: rounds whose loads are in flight, as the compiler counts them.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int


# The first of each list is used.
_TRITON: Mapping[tuple[Phase, int], Sequence[TritonConfig]] = {
    ("decode", 64): (
        TritonConfig(rows=16, tile=128, num_warps=4, num_stages=3),
        TritonConfig(rows=16, tile=64, num_warps=4, num_stages=3),
    ),
    ("decode", 128): (
        TritonConfig(rows=16, tile=64, num_warps=4, num_stages=3),
        TritonConfig(rows=16, tile=32, num_warps=4, num_stages=3),
        TritonConfig(rows=16, tile=64, num_warps=4, num_stages=5),
    ),
    ("decode", 256): (
        TritonConfig(rows=16, tile=32, num_warps=4, num_stages=3),
        TritonConfig(rows=16, tile=64, num_warps=8, num_stages=3),
    ),
    ("prefill", 64): (TritonConfig(rows=64, tile=64, num_warps=4, num_stages=3),),
    ("prefill", 128): (
        TritonConfig(rows=64, tile=64, num_warps=4, num_stages=3),
        TritonConfig(rows=128, tile=64, num_warps=8, num_stages=3),
    ),
    ("prefill", 256): (TritonConfig(rows=64, tile=32, num_warps=8, num_stages=2),),
}


def triton_candidates(phase: Phase, head_dim: int) -> Sequence[TritonConfig]:
    """Return the sizes worth measuring, the one in use first.

    Args:
        phase: the kernel.
        head_dim: as stored: 64, 128 or 256.
    """
    return _TRITON[phase, head_dim]


def triton_config(phase: Phase, head_dim: int) -> TritonConfig:
    """Return the sizes in use."""
    return triton_candidates(phase, head_dim)[0]
