"""Ragged paged attention for NVIDIA GPUs through Pallas' Triton backend.

The backend is deprecated in JAX, hence nothing of it is outside this file. It runs on Ampere, Ada
and Hopper, for all dtypes of the cache, and cannot deadlock. On a CPU the kernels are interpreted,
which is for tests.

Layout and write are those of `reference`, with heads padded to a power of two.

Three kernels:

* `decode`: programs take the splits of the plan in turn. The query heads that share a kv head are
  the rows of the products. Each split leaves its maximum, its sum and its weighted values.
* `merge`: adds the splits of a sequence, in order. Rows of no decode become zero.
* `prefill`: a program for some queries of a tile and a kv head, over their whole context.

What the result depends on: a decode's sum over context is ordered by its length alone, a prefill's
by the tiles from position 0 on. Neither knows who else is in the batch, or where a chunk began.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, DTypeLike, Float, Int

from kernels_pallas.kv_cache import KVCache, KVCacheDtype, scale_dtype, storage_dtype
from kernels_pallas.reference import write_kv
from kernels_pallas.tuning import TritonConfig, triton_config
from kernels_pallas.work_plan import QUERY_TILE, AttentionBatch

__all__ = ["attend", "new_kv_cache", "ragged_paged_attention", "write_kv"]

# Heads as they are stored.
HEAD_DIMS = (64, 128, 256)

# A masked score. Finite, so that a row without any valid key gives 0 / 1 and not NaN.
MASKED = -1e30

# Programs of the decode kernel, which take splits in turn: some for each of an H200's 132
# multiprocessors. Not one for each split: most of what the plan has room for is unused.
NUM_PROGRAMS = 132 * 4

# 32-bit offsets: the backend takes wider ones only for arrays of more than this many bytes, and
# counts elements. Smaller ones of so many eight-bit elements would be read at wrong places.
MAX_BYTES_WITH_NARROW_OFFSETS = 2**32

Ref = Any  # Pallas' references have no public type


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What the kernels know when they are compiled."""

    group_size: int
    head_dim: int
    block_size: int
    dtype: KVCacheDtype
    config: TritonConfig


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
    tokens = (num_layers * num_blocks, 2, num_kv_heads, block_size)
    num_elements = math.prod(tokens) * padded
    stored = storage_dtype(dtype)
    if num_elements > 2**31 and num_elements * stored.itemsize <= MAX_BYTES_WITH_NARROW_OFFSETS:
        per_block = num_elements // num_blocks
        raise ValueError(
            f"a KV cache of {num_elements} {stored.name} cannot be addressed by this kernel: take "
            f"at most {2**31 // per_block} blocks, or more than {2**32 // per_block}"
        )
    scales = scale_dtype(dtype)
    return KVCache(
        data=jnp.zeros((*tokens, padded), stored),
        scales=None if scales is None else jnp.zeros(tokens, scales),
        dtype=dtype,
        kernel="triton",
    )


def ragged_paged_attention(
    q_TNH: Float[Array, "T N H"],
    kv_cache: KVCache,
    batch: AttentionBatch,
    *,
    first_block: Int[Array, ""],
    num_kv_heads: int,
    scale: float,
    decode_only: bool,
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
    run = functools.partial(_run, q_TNH, kv_cache, batch, scalars, num_kv_heads, decode, prefill)
    out: Array = lax.platform_dependent(
        cpu=functools.partial(run, interpret=True), default=functools.partial(run, interpret=False)
    )
    return out[:, :, :head_dim]


def product_dtype(dtype: KVCacheDtype) -> jnp.dtype:
    """Return the dtype of the operands of the products.

    Both formats of eight-bit floats are float16 with fewer bits, which costs two operations to
    widen. Integers go with bfloat16, whose range holds their scales too.
    """
    wide: dict[KVCacheDtype, DTypeLike] = {
        "float32": jnp.float32,
        "bfloat16": jnp.bfloat16,
        "int8": jnp.bfloat16,
    }
    return jnp.dtype(wide.get(dtype, jnp.float16))


def _widen(stored: Array, dtype: KVCacheDtype) -> Array:
    """Return stored numbers for the products, without scales and `_factor`."""
    if dtype == "fp8_e4m3":
        # Its exponent has a bias of 7, not 15: what comes out is 2 ** -8 of the number.
        bits = stored.astype(jnp.uint16)
        return lax.bitcast_convert_type((bits & 0x80) << 8 | (bits & 0x7F) << 7, jnp.float16)
    if dtype == "fp8_e5m2":
        return lax.bitcast_convert_type(stored.astype(jnp.uint16) << 8, jnp.float16)
    return stored.astype(product_dtype(dtype))


def _factor(dtype: KVCacheDtype) -> float:
    """Return what `_widen` leaves out."""
    return 256.0 if dtype == "fp8_e4m3" else 1.0


def _run(
    q_TNH: Array,
    kv_cache: KVCache,
    batch: AttentionBatch,
    scalars: Int[Array, "3"],
    num_kv_heads: int,
    decode: TritonConfig,
    prefill: TritonConfig | None,
    *,
    interpret: bool,
) -> Array:
    """Launch the kernels; returns f32[T, N, padded H]."""
    num_tokens, num_heads, head_dim = q_TNH.shape
    group_size = num_heads // num_kv_heads
    num_splits = batch.decode_splits.shape[0]

    def shape_of(config: TritonConfig) -> Shape:
        # More query heads than rows need more rows, and so may have to do with fewer stages.
        rows = max(config.rows, pl.next_power_of_2(group_size))
        return Shape(
            group_size=group_size,
            head_dim=head_dim,
            block_size=kv_cache.data.shape[3],
            dtype=kv_cache.dtype,
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
        functools.partial(_decode_kernel, shape_of(decode), num_kv_heads),
        [scalars, batch.split_starts, batch.decode_splits, batch.block_tables, q_TNH, *cache],
        out=[
            jax.ShapeDtypeStruct((num_splits, num_heads, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_splits, 2, num_heads), jnp.float32),
        ],
        grid=(min(NUM_PROGRAMS, num_splits * num_kv_heads),),
        config=decode,
        name="decode",
    )
    (out,) = call(
        functools.partial(_merge_kernel, shape_of(decode)),
        [scalars, batch.split_starts, values, stats],
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
        functools.partial(_prefill_kernel, shape, queries),
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


def _decode_kernel(
    shape: Shape,
    num_kv_heads: int,
    scalars: Ref,
    split_starts: Ref,
    splits: Ref,
    tables: Ref,
    q: Ref,
    *refs: Ref,
) -> None:
    """Attend to every `num_programs`-th (split, kv head), beginning with the program's own."""
    (*cache, values, stats) = refs
    program, num_programs = pl.program_id(0), pl.num_programs(0)
    num_items = split_starts[split_starts.shape[0] - 1] * num_kv_heads
    row = jnp.arange(shape.config.rows, dtype=jnp.int32)
    mine = row < shape.group_size
    dims = jnp.arange(shape.head_dim, dtype=jnp.int32)[None]

    def attend_to(turn: Array, carry: None) -> None:
        item = program + turn * num_programs
        split, kv_head = item // num_kv_heads, item % num_kv_heads
        seq, start, end = splits[split, 0], splits[split, 1], splits[split, 2]
        heads = kv_head * shape.group_size + row
        queries = plt.load(q.at[seq, heads[:, None], dims], mask=mine[:, None], other=0.0)
        largest, total, acc = _online_softmax(
            shape,
            queries,
            jnp.where(mine, end - 1, -1),
            start,
            end,
            functools.partial(_load_tile, shape, tables, cache, seq, kv_head, scalars[0], end),
        )
        plt.store(values.at[split, heads[:, None], dims], acc, mask=mine[:, None])
        plt.store(stats.at[split, 0, heads], largest, mask=mine)
        plt.store(stats.at[split, 1, heads], total, mask=mine)

    turns = (num_items - program + num_programs - 1) // num_programs
    lax.fori_loop(0, turns, attend_to, None)


def _merge_kernel(
    shape: Shape, scalars: Ref, split_starts: Ref, values: Ref, stats: Ref, out: Ref
) -> None:
    """Add up the splits of token `program_id(0)`, for one kv head."""
    token, kv_head = pl.program_id(0), pl.program_id(1)
    row = jnp.arange(shape.config.rows, dtype=jnp.int32)
    mine = row < shape.group_size
    heads = kv_head * shape.group_size + row
    dims = jnp.arange(shape.head_dim, dtype=jnp.int32)[None]
    # Token and sequence are the same number here. Tokens past the sequences have no splits.
    is_decode = token < scalars[1]
    seq = jnp.where(is_decode, token, 0)
    first = split_starts[seq]
    last = jnp.where(is_decode, split_starts[seq + 1], first)

    def add(split: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        largest, total, acc = carry
        split_largest = plt.load(stats.at[split, 0, heads], mask=mine, other=MASKED)
        split_total = plt.load(stats.at[split, 1, heads], mask=mine, other=0.0)
        split_acc = plt.load(values.at[split, heads[:, None], dims], mask=mine[:, None], other=0.0)
        new_largest = jnp.maximum(largest, split_largest)
        decay, weight = jnp.exp2(largest - new_largest), jnp.exp2(split_largest - new_largest)
        return (
            new_largest,
            total * decay + split_total * weight,
            acc * decay[:, None] + split_acc * weight[:, None],
        )

    _, total, acc = lax.fori_loop(first, last, add, _nothing(shape))
    plt.store(out.at[token, heads[:, None], dims], _mean(shape, total, acc), mask=mine[:, None])


def _prefill_kernel(
    shape: Shape,
    num_queries: int,
    scalars: Ref,
    tiles: Ref,
    tables: Ref,
    q: Ref,
    *refs: Ref,
) -> None:
    """Attend for `num_queries` queries of a tile: rows are queries times query heads."""
    (*cache, _zeros, out) = refs
    tile, kv_head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    seq, first_token, first_position, queries_left = (tiles[tile, i] for i in range(4))
    first_query = part * num_queries

    @pl.when((tile < scalars[2]) & (first_query < queries_left))
    def attend_to() -> None:
        row = jnp.arange(shape.config.rows, dtype=jnp.int32)
        query = first_query + row // shape.group_size
        mine = (row < num_queries * shape.group_size) & (query < queries_left)
        heads = kv_head * shape.group_size + row % shape.group_size
        dims = jnp.arange(shape.head_dim, dtype=jnp.int32)[None]
        place = ((first_token + query)[:, None], heads[:, None], dims)
        end = first_position + jnp.minimum(first_query + num_queries, queries_left)
        _, total, acc = _online_softmax(
            shape,
            plt.load(q.at[place], mask=mine[:, None], other=0.0),
            jnp.where(mine, first_position + query, -1),
            jnp.int32(0),
            end,
            functools.partial(_load_tile, shape, tables, cache, seq, kv_head, scalars[0], end),
        )
        plt.store(out.at[place], _mean(shape, total, acc), mask=mine[:, None])


def _online_softmax(
    shape: Shape,
    queries: Array,
    last_position: Array,
    start: Array,
    end: Array,
    load_tile: Callable[[Array, int], tuple[Array, Array | None]],
) -> tuple[Array, Array, Array]:
    """Attend to positions `start` to `end`.

    Args:
        shape: as compiled.
        queries: [rows, H], scaled for base 2.
        last_position: i32[rows], the last position that a row may see; -1 for none.
        start: a multiple of the tile.
        end: the position after the last.
        load_tile: gives the numbers, [tile, H], and scales, [tile], of K (0) or V (1).

    Returns:
        Largest score and sum of weights, f32[rows], and weighted values, f32[rows, H].
    """
    tile = shape.config.tile
    # f32 is not rounded to what the matrix units like.
    exact = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None

    def visit(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        largest, total, acc = carry
        positions = index * tile + jnp.arange(tile, dtype=jnp.int32)
        keys, key_scales = load_tile(positions, 0)
        values, value_scales = load_tile(positions, 1)
        scores = plt.dot(queries, keys.T, precision=exact) * _factor(shape.dtype)
        if key_scales is not None:
            scores = scores * key_scales[None]
        visible = positions[None] <= last_position[:, None]
        scores = jnp.where(visible, scores, MASKED)
        new_largest = jnp.maximum(largest, scores.max(axis=1))
        weights = jnp.where(visible, jnp.exp2(scores - new_largest[:, None]), 0.0)
        decay = jnp.exp2(largest - new_largest)
        total = total * decay + weights.sum(axis=1)
        if value_scales is not None:
            weights = weights * value_scales[None]
        tile_acc = plt.dot(weights.astype(values.dtype), values, precision=exact)
        return new_largest, total, acc * decay[:, None] + tile_acc

    largest: Array
    total: Array
    acc: Array
    largest, total, acc = lax.fori_loop(start // tile, pl.cdiv(end, tile), visit, _nothing(shape))
    return largest, total, acc


def _load_tile(
    shape: Shape,
    tables: Ref,
    cache: list[Ref],
    seq: Array,
    kv_head: Array,
    first_block: Array,
    end: Array,
    positions: Array,
    which: int,
) -> tuple[Array, Array | None]:
    """Load K (0) or V (1) of the positions; nothing from `end` on, whose places hold anything."""
    written = positions < end
    blocks = plt.load(tables.at[seq, positions // shape.block_size], mask=written, other=0)
    blocks = blocks + first_block
    offsets = positions % shape.block_size
    dims = jnp.arange(shape.head_dim, dtype=jnp.int32)[None]
    stored = plt.load(
        cache[0].at[blocks[:, None], which, kv_head, offsets[:, None], dims],
        mask=written[:, None],
        other=0,
    )
    numbers = _widen(stored, shape.dtype)
    if len(cache) == 1:
        return numbers, None
    scales = plt.load(cache[1].at[blocks, which, kv_head, offsets], mask=written, other=0.0)
    return numbers, scales.astype(jnp.float32)


def _nothing(shape: Shape) -> tuple[Array, Array, Array]:
    """Return the softmax over no positions."""
    rows = shape.config.rows
    return (
        jnp.full((rows,), MASKED, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, shape.head_dim), jnp.float32),
    )


def _mean(shape: Shape, total: Array, acc: Array) -> Array:
    """Return the weighted mean; zero where nothing has weight."""
    return acc * (_factor(shape.dtype) / jnp.maximum(total, 1e-30))[:, None]
