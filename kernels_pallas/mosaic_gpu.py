"""Ragged paged attention for Hopper through Pallas' Mosaic GPU backend.

TMA fetches whole blocks, the matrix units take 64 rows at a time, and one warpgroup only fetches.
Caches of bfloat16 and float16; others are for `triton`. On a CPU the kernels run in an interpreter
that knows threads and barriers, which is for tests of a few tokens.

Layout and write are those of `reference`, with heads padded to 64 or 128. The order of sums
is that of `triton`: by splits and tiles of a sequence's own length.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.gpu_scores import Scoring
from kernels_pallas.kv_cache import KVCache, KVCacheDtype, zeros_kv_cache
from kernels_pallas.mosaic_decode import ROWS, attend_to_splits, merge
from kernels_pallas.mosaic_prefill import attend_to_prompts
from kernels_pallas.reference import write_kv
from kernels_pallas.tuning import MosaicConfig, mosaic_config
from kernels_pallas.work_plan import AttentionBatch

__all__ = ["attend", "new_kv_cache", "ragged_paged_attention", "write_kv"]

# Heads as they are stored. Wider ones do not fit into shared memory with this plan.
HEAD_DIMS = (64, 128)

BLOCK_SIZES = (8, 16, 32, 64, 128)

DTYPES: tuple[KVCacheDtype, ...] = ("bfloat16", "float16")

# How a CPU stands in for the GPU.
INTERPRETER = plgpu.InterpretGPUParams()


def new_kv_cache(
    *,
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: KVCacheDtype,
) -> KVCache:
    """Return a cache of zeros; see the module docstring."""
    if dtype not in DTYPES:
        raise ValueError(f"this kernel has no cache of {dtype}, only of {' and '.join(DTYPES)}")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size {block_size} must be 8, 16, 32, 64 or 128")
    padded = next((size for size in HEAD_DIMS if size >= head_dim), None)
    if padded is None:
        raise ValueError(f"heads of {head_dim} exceed the largest, {HEAD_DIMS[-1]}")
    shape = (num_layers * num_blocks, 2, num_kv_heads, block_size, padded)
    return zeros_kv_cache(shape, dtype=dtype, kernel="mosaic_gpu")


def ragged_paged_attention(
    q_TNH: Float[Array, "T N H"],
    kv_cache: KVCache,
    batch: AttentionBatch,
    *,
    first_block: Int[Array, ""],
    num_kv_heads: int,
    scale: float,
    decode_only: bool,
    sliding_window: int | None,
    soft_cap: float | None,
) -> Float[Array, "T N H"]:
    """Attend; the arguments are those of the contract, checked."""
    head_dim = kv_cache.data.shape[-1]
    return attend(
        q_TNH,
        kv_cache,
        batch,
        first_block=first_block,
        num_kv_heads=num_kv_heads,
        scale=scale,
        decode=mosaic_config("decode", head_dim),
        prefill=None if decode_only else mosaic_config("prefill", head_dim),
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )


def attend(
    q_TNH: Float[Array, "T N H"],
    kv_cache: KVCache,
    batch: AttentionBatch,
    *,
    first_block: Int[Array, ""],
    num_kv_heads: int,
    scale: float,
    decode: MosaicConfig,
    prefill: MosaicConfig | None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "T N H"]:
    """Attend with the given sizes; without `prefill`, to decodes only."""
    num_tokens, num_heads, head_dim = q_TNH.shape
    group_size = num_heads // num_kv_heads
    if group_size > ROWS:
        raise ValueError(f"{group_size} query heads for a kv head exceed {ROWS}")
    # Base 2: the kernels have exp2.
    q = q_TNH.astype(jnp.float32) * (scale * math.log2(math.e))
    if kv_cache.data.dtype == jnp.float16:
        q = jnp.clip(q, -65504.0, 65504.0)
    q = q.astype(kv_cache.data.dtype)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, kv_cache.data.shape[-1] - head_dim)))
    q = q.reshape(num_tokens, num_kv_heads, group_size, -1)
    scoring = Scoring(sliding_window=sliding_window, soft_cap=soft_cap)
    out = _run(q, kv_cache.data, batch, first_block[None], decode, prefill, scoring, _interpreter())
    return out.reshape(num_tokens, num_heads, -1)[:, :, :head_dim]


def _interpreter() -> Any:
    """Return what runs the kernels where JAX compiles for a CPU; False elsewhere.

    Not `lax.platform_dependent`: JAX lowers no branch whose other branch has effects, and the
    interpreter has.
    """
    is_compiled_for_gpu = jax.sharding.get_abstract_mesh().abstract_device is not None
    return INTERPRETER if jax.default_backend() == "cpu" and not is_compiled_for_gpu else False


def _run(
    q_TKGH: Array,
    data: Array,
    batch: AttentionBatch,
    first_block: Array,
    decode: MosaicConfig,
    prefill: MosaicConfig | None,
    scoring: Scoring,
    interpret: Any,
) -> Array:
    """Launch the kernels; returns f32[T, K, G, padded H]."""
    num_tokens, num_kv_heads, group_size, head_dim = q_TKGH.shape
    num_seqs = batch.seq_lens.shape[0]
    rows = group_size + -group_size % 8
    q_SKRH = jnp.pad(q_TKGH[:num_seqs], ((0, 0), (0, 0), (0, rows - group_size), (0, 0)))
    splits, split_starts = batch.splits(scoring.sliding_window)
    means, logs = attend_to_splits(
        q_SKRH,
        data,
        batch.block_tables,
        splits,
        split_starts,
        first_block,
        decode,
        scoring,
        interpret,
    )
    out = merge(means, logs, split_starts, interpret)
    out = out[:, : num_kv_heads * rows].reshape(num_seqs, num_kv_heads, rows, head_dim)
    out = jnp.pad(out[:, :, :group_size], ((0, num_tokens - num_seqs), (0, 0), (0, 0), (0, 0)))
    if prefill is None:
        return out
    prompts = attend_to_prompts(
        q_TKGH,
        data,
        batch.block_tables,
        batch.prefill_tiles,
        batch.num_prefill_tiles,
        first_block,
        prefill,
        scoring,
        interpret,
    )
    # A token is a decode or belongs to a prompt; the other is zero.
    is_decode = jnp.arange(num_tokens) < batch.num_decodes
    return jnp.where(is_decode[:, None, None, None], out, prompts)
