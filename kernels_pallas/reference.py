"""Ragged paged attention in plain XLA: the definition of correct, and the CPU path.

Flash-style online softmax over KV tiles of a fixed size in a fixed order, with decodes as a
dense batch and prefill chunks as query tiles. Two rules make the result of a token independent
of everything but its own sequence, bit by bit:

* every sum over context runs inside a tile of `KV_TILE` tokens, and tiles are added in order;
* every reduction is a matrix product whose rows are a multiple of `ROW_MULTIPLE`, and whose heads
  are as wide as a multiple of `HEAD_MULTIPLE`. XLA's CPU products of such sizes give a row the
  same bits whatever the number of rows (measured; a test holds it), while its plain reductions
  are ordered by the fusion that they end up in.

Cache layout: [layers * blocks, 2, K, block_size, H'], 0 = K and 1 = V, H' = H rounded up. The
tokens of one (block, head) are contiguous: one stream of cache lines here, one TMA box on a GPU.
Scales, where the dtype has some, are [layers * blocks, 2, K, block_size].

What is stored in eight bits is converted after the gather. Its scales are the same for a whole
key or value, so they multiply scores and weights, and not every element.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels_pallas.kv_cache import (
    KVCache,
    KVCacheDtype,
    decode_kv,
    encode_kv,
    product_dtype,
    zeros_kv_cache,
)
from kernels_pallas.work_plan import QUERY_TILE, AttentionBatch

__all__ = ["KV_TILE", "new_kv_cache", "ragged_paged_attention", "write_kv"]

# Context tokens per step of the online softmax. Every block size divides it.
KV_TILE = 128

# Query heads that share a kv head are padded with zero rows to a multiple of this. One row takes
# another code path; older versions of XLA also need whole vectors of rows.
ROW_MULTIPLE = 4

# Heads are padded with zeros to a multiple of this. Narrower products, and 80 or 96 wide ones,
# switch to another order of summation when they have many rows.
HEAD_MULTIPLE = 64

# Decode sequences that are attended to together; bounds the gathered KV of one iteration.
DECODE_GROUP = 16

# A masked score. Finite, so that a row without any valid key gives 0 / 1 and not NaN.
MASKED = -1e30

# Columns of the ones that turn a row sum into a product.
SUM_COLUMNS = 8


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
    if block_size < 1 or KV_TILE % block_size:
        raise ValueError(f"block_size {block_size} must divide {KV_TILE}")
    padded_head_dim = head_dim + -head_dim % HEAD_MULTIPLE
    return zeros_kv_cache(
        (num_layers * num_blocks, 2, num_kv_heads, block_size, padded_head_dim),
        dtype=dtype,
        kernel="reference",
    )


def write_kv(
    kv_cache: KVCache,
    k_TKH: Float[Array, "T K H"],
    v_TKH: Float[Array, "T K H"],
    slot_mapping_T: Int[Array, "T"],
    *,
    first_block: Int[Array, ""],
) -> KVCache:
    """Scatter K and V to their slots. Padding tokens share block 0, whose content is never read."""
    block_size = kv_cache.data.shape[3]
    data_T2KH, scales_T2K = encode_kv(jnp.stack([k_TKH, v_TKH], axis=1), kv_cache.dtype)
    blocks_T, offsets_T = slot_mapping_T // block_size + first_block, slot_mapping_T % block_size
    data = kv_cache.data.at[blocks_T, :, :, offsets_T, :].set(
        _pad_heads(data_T2KH, kv_cache.data.shape[-1]), mode="promise_in_bounds"
    )
    scales = kv_cache.scales
    if scales is not None:
        scales = scales.at[blocks_T, :, :, offsets_T].set(scales_T2K, mode="promise_in_bounds")
    return KVCache(data, scales, kv_cache.dtype, kv_cache.kernel)


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
    num_tokens, num_heads, head_dim = q_TNH.shape
    group_size = num_heads // num_kv_heads
    q_TKGH = (q_TNH.astype(jnp.float32) * scale).astype(product_dtype(kv_cache.dtype))
    q_TKGH = q_TKGH.reshape(num_tokens, num_kv_heads, group_size, head_dim)
    q_TKGH = jnp.pad(q_TKGH, ((0, 0), (0, 0), (0, -group_size % ROW_MULTIPLE), (0, 0)))
    q_TKGH = _pad_heads(q_TKGH, kv_cache.data.shape[-1])
    # Whole tiles only: pad the tables to a multiple of a tile's blocks.
    tile_blocks = KV_TILE // kv_cache.data.shape[3]
    tables = batch.block_tables
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % tile_blocks)))
    tables = tables + first_block
    scoring = _Scoring(sliding_window, soft_cap)

    out_TKGH = _decode(q_TKGH, kv_cache, batch.seq_lens, tables, batch.num_decodes, scoring)
    if not decode_only:
        out_TKGH = _prefill(
            q_TKGH,
            kv_cache,
            tables,
            batch.prefill_tiles,
            batch.num_prefill_tiles,
            out_TKGH,
            scoring,
        )
    return out_TKGH[:, :, :group_size, :head_dim].reshape(num_tokens, num_heads, head_dim)


def _pad_heads(x: Array, size: int) -> Array:
    """Pad the last axis with zeros to that of the cache."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


class _Scoring(NamedTuple):
    """What becomes of a score; as of the contract."""

    sliding_window: int | None
    soft_cap: float | None


def _decode(
    q_TKGH: Array,
    kv_cache: KVCache,
    seq_lens: Array,
    tables: Array,
    num_decodes: Array,
    scoring: _Scoring,
) -> Array:
    """Attend for sequences s < num_decodes, whose only query is token s, group by group.

    Returns f32[T, K, G, H]; rows of other tokens are zero.
    """
    num_tokens, num_seqs = q_TKGH.shape[0], seq_lens.shape[0]
    group = min(DECODE_GROUP, num_seqs)
    # Whole groups only: pad the sequences, and the tokens where they would not reach.
    padding = -num_seqs % group
    lens = jnp.pad(jnp.where(jnp.arange(num_seqs) < num_decodes, seq_lens, 0), (0, padding))
    tables = jnp.pad(tables, ((0, padding), (0, 0)))
    missing_tokens = max(num_seqs + padding - num_tokens, 0)
    q_TKGH = jnp.pad(q_TKGH, ((0, missing_tokens), (0, 0), (0, 0), (0, 0)))
    out = jnp.zeros(q_TKGH.shape, jnp.float32)

    def attend(index: Array, out: Array) -> Array:
        first = index * group
        q = lax.dynamic_slice_in_dim(q_TKGH, first, group)
        group_lens = lax.dynamic_slice_in_dim(lens, first, group)
        group_tables = lax.dynamic_slice_in_dim(tables, first, group)
        result = _online_softmax(
            q,
            kv_cache,
            group_tables,
            scoring,
            last_position=group_lens[:, None] - 1,
            num_keys=jnp.max(group_lens),
        )
        return lax.dynamic_update_slice_in_dim(out, result, first, axis=0)

    attended: Array = lax.fori_loop(0, (num_decodes + group - 1) // group, attend, out)
    return attended[:num_tokens]


def _prefill(
    q_TKGH: Array,
    kv_cache: KVCache,
    tables: Array,
    prefill_tiles: Array,
    num_prefill_tiles: Array,
    out_TKGH: Array,
    scoring: _Scoring,
) -> Array:
    """Attend for the query tiles, in packed order, and put the rows into `out`.

    A tile writes all its QUERY_TILE rows. Rows past its own tokens belong to later tiles, which
    overwrite them, or to padding.
    """
    num_tokens, num_kv_heads, group_size, head_dim = q_TKGH.shape
    q_padded = jnp.pad(q_TKGH, ((0, QUERY_TILE), (0, 0), (0, 0), (0, 0)))
    out_padded = jnp.pad(out_TKGH, ((0, QUERY_TILE), (0, 0), (0, 0), (0, 0)))

    def attend(index: Array, out: Array) -> Array:
        seq, first_token, first_position, num_queries = prefill_tiles[index]
        q = lax.dynamic_slice_in_dim(q_padded, first_token, QUERY_TILE)
        # The rows of a kv head: queries x group, as one left operand.
        q = q.transpose(1, 0, 2, 3).reshape(1, num_kv_heads, QUERY_TILE * group_size, head_dim)
        # Rows past the tile's own tokens see what the last one sees: nothing that is unwritten.
        offsets = jnp.minimum(jnp.arange(QUERY_TILE), num_queries - 1)
        result = _online_softmax(
            q,
            kv_cache,
            lax.dynamic_slice_in_dim(tables, seq, 1),
            scoring,
            last_position=jnp.repeat(first_position + offsets, group_size)[None],
            num_keys=first_position + num_queries,
        )
        result = result.reshape(num_kv_heads, QUERY_TILE, group_size, head_dim)
        return lax.dynamic_update_slice_in_dim(
            out, result.transpose(1, 0, 2, 3), first_token, axis=0
        )

    attended: Array = lax.fori_loop(0, num_prefill_tiles, attend, out_padded)
    return attended[:num_tokens]


def _online_softmax(
    q_BKRH: Array,
    kv_cache: KVCache,
    tables_BM: Array,
    scoring: _Scoring,
    *,
    last_position: Array,
    num_keys: Array,
) -> Array:
    """Attend R query rows of B sequences to the first `num_keys` positions of their contexts.

    Tiles that no row sees are not visited; one that a row does not see changes none of its bits.

    Args:
        q_BKRH: scaled queries, in the dtype of the products.
        kv_cache: the whole cache.
        tables_BM: rows of the cache, M a multiple of a tile's blocks.
        scoring: what becomes of scores.
        last_position: i32[B, 1 or R], the last position that a row may see; -1 for none.
        num_keys: positions to visit; rounded up to whole tiles.

    Returns:
        f32[B, K, R, H]; rows that may see nothing are finite.
    """
    num_seqs, num_kv_heads, num_rows, head_dim = q_BKRH.shape
    block_size = kv_cache.data.shape[3]
    tile_blocks = KV_TILE // block_size
    # [rows of (block, K or V, head), block_size * H]: one contiguous slice per gathered row.
    data = kv_cache.data.reshape(-1, block_size * head_dim)
    scales = None if kv_cache.scales is None else kv_cache.scales.reshape(-1, block_size)
    heads = jnp.arange(num_kv_heads)[None, :, None]
    row_shape = (num_seqs, num_kv_heads, num_rows)
    # With the tokens last, and as a plain product of two matrices: XLA turns what is not one so
    # that they come first, and adds some sizes of that in another order (64 rows by 8, on Zen 5).
    ones = jnp.ones((SUM_COLUMNS, KV_TILE), jnp.float32)

    def gather(blocks: Array, which: int) -> tuple[Array, Array | None]:
        """Return K or V of a tile, [B, K, C, H], and its scales, [B, K, 1, C]."""
        # The barriers keep the index arithmetic and the reshape out of the copying loop, which is
        # a third faster for it.
        index = lax.optimization_barrier((blocks[:, None, :] * 2 + which) * num_kv_heads + heads)
        rows: Array = lax.optimization_barrier(data.at[index].get(mode="promise_in_bounds"))
        rows = rows.reshape(num_seqs, num_kv_heads, KV_TILE, head_dim)
        if scales is None:
            return decode_kv(rows, kv_cache.dtype), None
        factors = scales.at[index].get(mode="promise_in_bounds").astype(jnp.float32)
        return decode_kv(rows, kv_cache.dtype), factors.reshape(num_seqs, num_kv_heads, 1, KV_TILE)

    def visit(tile: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        running_max, total, out = carry
        blocks = lax.dynamic_slice_in_dim(tables_BM, tile * tile_blocks, tile_blocks, axis=1)
        keys, key_scales = gather(blocks, 0)
        values, value_scales = gather(blocks, 1)
        scores = _product("bkrh,bkch->bkrc", q_BKRH, keys)
        if key_scales is not None:
            scores = scores * key_scales
        if scoring.soft_cap is not None:
            scores = scoring.soft_cap * jnp.tanh(scores / scoring.soft_cap)
        positions = tile * KV_TILE + jnp.arange(KV_TILE)
        visible = (positions <= last_position[:, :, None])[:, None]
        if scoring.sliding_window is not None:
            after = last_position[:, :, None] - scoring.sliding_window
            visible &= (positions > after)[:, None]
        scores = jnp.where(visible, scores, MASKED)
        new_max = jnp.maximum(running_max, scores.max(-1))
        weights = jnp.where(visible, jnp.exp(scores - new_max[..., None]), 0.0)
        decay = jnp.exp(running_max - new_max)
        totals = _product("rc,xc->rx", weights.reshape(-1, KV_TILE), ones)[:, 0]
        tile_total = totals.reshape(row_shape)
        if value_scales is not None:
            weights = jnp.where(visible, weights * value_scales, 0.0)
        tile_out = _product("bkrc,bkch->bkrh", weights.astype(values.dtype), values)
        return new_max, total * decay + tile_total, out * decay[..., None] + tile_out

    start = (
        jnp.full(row_shape, MASKED, jnp.float32),
        jnp.zeros(row_shape, jnp.float32),
        jnp.zeros((*row_shape, head_dim), jnp.float32),
    )
    num_tiles = (num_keys + KV_TILE - 1) // KV_TILE
    first_tile: Array | int = 0
    if scoring.sliding_window is not None:
        first_position = jnp.maximum(last_position - scoring.sliding_window + 1, 0)
        # Rows that see nothing do not ask for tiles.
        first_tile = jnp.min(jnp.where(last_position < 0, num_keys, first_position)) // KV_TILE
    total: Array
    out: Array
    _, total, out = lax.fori_loop(first_tile, num_tiles, visit, start)
    return out / jnp.maximum(total, 1e-30)[..., None]


def _product(equation: str, left: Array, right: Array) -> Array:
    """Einsum with f32 accumulation; f32 operands are not rounded on any platform."""
    return jnp.einsum(
        equation,
        left,
        right,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if left.dtype == jnp.float32 else None,
    )
