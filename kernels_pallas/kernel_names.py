"""The names of the attention kernels; needs no JAX."""

from typing import Literal

__all__ = ["AttentionKernel", "WantedKernel"]

# The implementations of the attention; each has its own layout of the cache.
AttentionKernel = Literal["reference", "native", "triton", "mosaic_gpu"]

# What an operator may ask for; "auto" is the fastest that works.
WantedKernel = Literal["auto", "reference", "native", "triton", "mosaic_gpu"]
