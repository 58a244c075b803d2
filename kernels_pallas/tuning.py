"""How large the pieces are that the GPU kernels work in: one table, compiled whole by the tests.

A larger tile reads more ahead and needs more registers and shared memory. No entry may spill, and
every one fits into what the smallest supported GPU, an L4, gives one block of threads. The order
of speed is estimated, not measured: `python -m bench.gpu` ranks the entries on a GPU, and prints
the table in the order that it found.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "MosaicConfig",
    "Phase",
    "TritonConfig",
    "mosaic_candidates",
    "mosaic_config",
    "triton_candidates",
    "triton_config",
]

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


@dataclass(frozen=True, kw_only=True, slots=True)
class MosaicConfig:
    """Sizes of a kernel of the Mosaic GPU backend.

    Attributes:
        tile: context tokens per round of the online softmax; divides SPLIT_MULTIPLE.
        num_slots: tiles of K, and of V, in shared memory.
        num_readers: warpgroups that multiply, 64 rows each; the decode kernel has one.
        num_programs: programs of the decode kernel.
    """

    tile: int = 64
    num_slots: int
    num_readers: int = 1
    num_programs: int = 132


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
        TritonConfig(rows=64, tile=64, num_warps=8, num_stages=3),
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


_MOSAIC: Mapping[tuple[Phase, int], Sequence[MosaicConfig]] = {
    ("decode", 64): (MosaicConfig(num_slots=4), MosaicConfig(num_slots=4, num_programs=264)),
    ("decode", 128): (MosaicConfig(num_slots=4), MosaicConfig(num_slots=3)),
    ("prefill", 64): (MosaicConfig(num_slots=3, num_readers=2),),
    ("prefill", 128): (
        MosaicConfig(num_slots=2, num_readers=2),
        MosaicConfig(num_slots=3, num_readers=2),
    ),
}


def mosaic_candidates(phase: Phase, head_dim: int) -> Sequence[MosaicConfig]:
    """Return the sizes worth measuring, the one in use first; arguments as `triton_candidates`."""
    return _MOSAIC[phase, head_dim]


def mosaic_config(phase: Phase, head_dim: int) -> MosaicConfig:
    """Return the sizes in use."""
    return mosaic_candidates(phase, head_dim)[0]
