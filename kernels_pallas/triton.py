"""Ragged paged attention for NVIDIA GPUs through Pallas' Triton backend.

The backend is deprecated in JAX, hence nothing of it is outside this file and `triton_kernels`. It
runs on Ampere, Ada and Hopper, for all dtypes of the cache, and cannot deadlock. On a CPU the
kernels are interpreted, which is for tests.

Layout and write are those of `reference`, with heads padded to a power of two.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from kernels_pallas.gpu_scores import Scoring
from kernels_pallas.kv_cache import KVCache, KVCacheDtype, storage_dtype, zeros_kv_cache
from kernels_pallas.reference import write_kv
from kernels_pallas.triton_kernels import (
    Shape,
    decode_kernel,
    merge_kernel,
    prefill_kernel,
    product_dtype,
)
from kernels_pallas.tuning import TritonConfig, triton_config
from kernels_pallas.work_plan import QUERY_TILE, AttentionBatch

__all__ = ["attend", "new_kv_cache", "ragged_paged_attention", "write_kv"]

# Heads as they are stored.
HEAD_DIMS = (64, 128, 256)

# Programs of the decode kernel, which take splits in turn: some for each of an H200's 132
# multiprocessors. Not one for each split: most of what the plan has room for is unused.
NUM_PROGRAMS = 132 * 4

# 32-bit offsets: the backend takes wider ones only for arrays of more than this many bytes, and
# counts elements. Smaller ones of so many eight-bit elements would be read at wrong places.
MAX_BYTES_WITH_NARROW_OFFSETS = 2**32


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
    if block_size not in (8, 16, 32, 64, 128):
        raise ValueError(f"block_size {block_size} must be 8, 16, 32, 64 or 128")
    padded = next((size for size in HEAD_DIMS if size >= head_dim), None)
    if padded is None:
        raise ValueError(f"heads of {head_dim} exceed the largest, {HEAD_DIMS[-1]}")
    shape = (num_layers * num_blocks, 2, num_kv_heads, block_size, padded)
    num_elements = math.prod(shape)
    stored = storage_dtype(dtype)
    if num_elements > 2**31 and num_elements * stored.itemsize <= MAX_BYTES_WITH_NARROW_OFFSETS:
        per_block = num_elements // num_blocks
        raise ValueError(
            f"a KV cache of {num_elements} {stored.name} cannot be addressed by this kernel: take "
            f"at most {2**31 // per_block} blocks, or more than {2**32 // per_block}"
        )
    return zeros_kv_cache(shape, dtype=dtype, kernel="triton")


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
        decode=triton_config("decode", head_dim),
        prefill=None if decode_only else triton_config("prefill", head_dim),
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
    decode: TritonConfig,
    prefill: TritonConfig | None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "T N H"]:
    """Attend with the given sizes; without `prefill`, to decodes only."""
    head_dim = q_TNH.shape[-1]
    # Base 2: the kernels have exp2. float16 holds every query that is not absurd.
    q_TNH = q_TNH.astype(jnp.float32) * (scale * math.log2(math.e))
    if product_dtype(kv_cache.dtype) == jnp.float16:
        q_TNH = jnp.clip(q_TNH, -65504.0, 65504.0)
    q_TNH = q_TNH.astype(product_dtype(kv_cache.dtype))
    q_TNH = jnp.pad(q_TNH, ((0, 0), (0, 0), (0, kv_cache.data.shape[-1] - head_dim)))

    # A kernel takes arrays only: the step's scalars and the layer's place travel as one.
    scalars = jnp.stack([first_block, batch.num_decodes, batch.num_prefill_tiles])
    scoring = Scoring(sliding_window=sliding_window, soft_cap=soft_cap)
    run = functools.partial(
        _run, q_TNH, kv_cache, batch, scalars, num_kv_heads, decode, prefill, scoring
    )
    out: Array = lax.platform_dependent(
        cpu=functools.partial(run, interpret=True), default=functools.partial(run, interpret=False)
    )
    return out[:, :, :head_dim]


def _run(
    q_TNH: Array,
    kv_cache: KVCache,
    batch: AttentionBatch,
    scalars: Int[Array, "3"],
    num_kv_heads: int,
    decode: TritonConfig,
    prefill: TritonConfig | None,
    scoring: Scoring,
    *,
    interpret: bool,
) -> Array:
    """Launch the kernels; returns f32[T, N, padded H]."""
    num_tokens, num_heads, head_dim = q_TNH.shape
    group_size = num_heads // num_kv_heads
    splits, split_starts = batch.splits(scoring.sliding_window)
    num_splits = splits.shape[0]

    def shape_of(config: TritonConfig) -> Shape:
        # More query heads than rows need more rows, and so may have to do with fewer stages.
        rows = max(config.rows, pl.next_power_of_2(group_size))
        return Shape(
            group_size=group_size,
            head_dim=head_dim,
            block_size=kv_cache.data.shape[3],
            dtype=kv_cache.dtype,
            scoring=scoring,
            config=TritonConfig(
                rows=rows,
                tile=config.tile,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            ),
        )

    call = functools.partial(_call, interpret=interpret)
    cache = [kv_cache.data] if kv_cache.scales is None else [kv_cache.data, kv_cache.scales]
    values, stats = call(
        functools.partial(decode_kernel, shape_of(decode), num_kv_heads),
        [scalars, split_starts, splits, batch.block_tables, q_TNH, *cache],
        out=[
            jax.ShapeDtypeStruct((num_splits, num_heads, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_splits, 2, num_heads), jnp.float32),
        ],
        grid=(min(NUM_PROGRAMS, num_splits * num_kv_heads),),
        config=decode,
        name="decode",
    )
    (out,) = call(
        functools.partial(merge_kernel, shape_of(decode)),
        [scalars, split_starts, values, stats],
        out=[jax.ShapeDtypeStruct(q_TNH.shape, jnp.float32)],
        grid=(num_tokens, num_kv_heads),
        config=decode,
        name="merge",
    )
    if prefill is None:
        return out
    shape = shape_of(prefill)
    queries = shape.config.rows // group_size
    (out,) = call(
        functools.partial(prefill_kernel, shape, queries),
        [scalars, batch.prefill_tiles, batch.block_tables, q_TNH, *cache, out],
        out=[jax.ShapeDtypeStruct(q_TNH.shape, jnp.float32)],
        grid=(batch.prefill_tiles.shape[0], num_kv_heads, pl.cdiv(QUERY_TILE, queries)),
        config=prefill,
        name="prefill",
        in_place=True,
    )
    return out


def _call(
    kernel: Callable[..., None],
    arrays: list[Array],
    *,
    out: list[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    config: TritonConfig,
    name: str,
    interpret: bool,
    in_place: bool = False,
) -> list[Array]:
    """Launch a kernel that sees its arrays whole; `in_place`: the last one becomes the output."""
    whole = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[whole] * len(arrays),
        out_specs=[whole] * len(out),
        out_shape=out,
        input_output_aliases={len(arrays) - 1: 0} if in_place else {},
        compiler_params=plt.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name=f"ragged_paged_attention_{name}",
    )
    results: list[Array] = call(*arrays)
    return results
