"""The kernels of `triton`, as they run on the device.

Three kernels:

* `decode`: programs take the splits of the plan in turn. The query heads that share a kv head are
  the rows of the products. Each split leaves its maximum, its sum and its weighted values.
* `merge`: adds the splits of a sequence, in order. Rows of no decode become zero.
* `prefill`: a program for some queries of a tile and a kv head, over all that they see.

What the result depends on: a decode's sum over context is ordered by its length alone, a prefill's
by the tiles from position 0 on. Neither knows who else is in the batch, or where a chunk began.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, DTypeLike

from kernels_pallas.gpu_scores import Scoring
from kernels_pallas.kv_cache import KVCacheDtype
from kernels_pallas.tuning import TritonConfig

__all__ = ["Shape", "decode_kernel", "merge_kernel", "prefill_kernel", "product_dtype", "widen"]

# A masked score. Finite, so that a row without any valid key gives 0 / 1 and not NaN.
MASKED = -1e30

# What a number of e4m3 is to float16 of the same exponent bits.
E4M3_FACTOR = 2.0**8

Ref = Any  # Pallas' references have no public type


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What the kernels know when they are compiled."""

    group_size: int
    head_dim: int
    block_size: int
    dtype: KVCacheDtype
    scoring: Scoring
    config: TritonConfig


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


def widen(stored: Array, dtype: KVCacheDtype) -> tuple[Array, float]:
    """Return stored numbers for the products, without their scales, and a factor on all of them."""
    if dtype == "fp8_e4m3":
        # Its exponent has a bias of 7, not 15: what comes out is 2 ** -8 of the number.
        bits = stored.astype(jnp.uint16)
        bits = (bits & 0x80) << 8 | (bits & 0x7F) << 7
        return lax.bitcast_convert_type(bits, jnp.float16), E4M3_FACTOR
    if dtype == "fp8_e5m2":
        return lax.bitcast_convert_type(stored.astype(jnp.uint16) << 8, jnp.float16), 1.0
    return stored.astype(product_dtype(dtype)), 1.0


def _factor(dtype: KVCacheDtype) -> float:
    """Return what `widen` leaves out."""
    return E4M3_FACTOR if dtype == "fp8_e4m3" else 1.0


def decode_kernel(
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
        position = shape.scoring.query_position(splits, split_starts, seq, end)
        heads = kv_head * shape.group_size + row
        queries = plt.load(q.at[seq, heads[:, None], dims], mask=mine[:, None], other=0.0)
        largest, total, acc = _online_softmax(
            shape,
            queries,
            jnp.where(mine, position, -1),
            start,
            end,
            functools.partial(_load_tile, shape, tables, cache, seq, kv_head, scalars[0], end),
        )
        plt.store(values.at[split, heads[:, None], dims], acc, mask=mine[:, None])
        plt.store(stats.at[split, 0, heads], largest, mask=mine)
        plt.store(stats.at[split, 1, heads], total, mask=mine)

    turns = (num_items - program + num_programs - 1) // num_programs
    lax.fori_loop(0, turns, attend_to, None)


def merge_kernel(
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


def prefill_kernel(
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
        seen = shape.scoring.first_visible(first_position + first_query)
        _, total, acc = _online_softmax(
            shape,
            plt.load(q.at[place], mask=mine[:, None], other=0.0),
            jnp.where(mine, first_position + query, -1),
            seen // shape.config.tile * shape.config.tile,
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
        scores = shape.scoring.cap(scores)
        visible = shape.scoring.visible(positions[None], last_position[:, None])
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
    numbers, _ = widen(stored, shape.dtype)
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
