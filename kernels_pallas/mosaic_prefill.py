"""Prompts on Hopper, through Pallas' Mosaic GPU backend: one kernel, and the packing around it.

A program attends for a part of a query tile and a kv head, over all that they see. One warpgroup
fetches K and V, the others multiply 64 rows each: queries times the query heads of the kv head.
TMA moves rows by eights and tokens begin anywhere, so XLA gathers the rows of all parts before, and
puts them back after.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.gpu_scores import Scoring
from kernels_pallas.mosaic_decode import ROWS, Ring, nothing, swizzled, weights_scratch
from kernels_pallas.tuning import MosaicConfig
from kernels_pallas.work_plan import QUERY_TILE

__all__ = ["attend_to_prompts"]

Ref = Any  # Pallas' references have no public type


def attend_to_prompts(
    q_TKGH: Float[Array, "T K G H"],
    data: Array,
    tables: Int[Array, "S M"],
    tiles: Int[Array, "W 4"],
    num_tiles: Int[Array, ""],
    first_block: Int[Array, "1"],
    config: MosaicConfig,
    scoring: Scoring,
    interpret: Any,
) -> Float[Array, "T K G H"]:
    """Attend for the query tiles of the plan; what belongs to none of them becomes zero.

    Args:
        q_TKGH: queries, scaled for base 2.
        data: of the cache.
        tables: block ids.
        tiles: of the plan.
        num_tiles: rows of it in use.
        first_block: row of the layer's block 0.
        config: sizes.
        scoring: what becomes of scores.
        interpret: for Pallas.
    """
    num_tokens, num_kv_heads, group_size, head_dim = q_TKGH.shape
    num_rows = config.num_readers * ROWS
    queries = num_rows // group_size  # of a part
    parts = -(-QUERY_TILE // queries)
    # The packed token of each query of each part, and whether there is one.
    query = jnp.arange(parts * queries).reshape(1, parts, queries)
    exists = (query < tiles[:, 3, None, None]) & (
        jnp.arange(tiles.shape[0])[:, None, None] < num_tiles
    )
    tokens = jnp.where(exists, tiles[:, 1, None, None] + query, num_tokens)
    q_parts = q_TKGH.at[tokens].get(mode="fill", fill_value=0)  # [W, parts, queries, K, G, H]
    q_parts = q_parts.transpose(0, 1, 3, 2, 4, 5).reshape(
        tiles.shape[0], parts, num_kv_heads, queries * group_size, head_dim
    )
    q_parts = jnp.pad(q_parts, [(0, 0)] * 3 + [(0, num_rows - queries * group_size), (0, 0)])
    counts = jnp.concatenate([num_tiles[None], first_block])
    out = _attend(
        q_parts, data, tables, tiles, counts, queries, group_size, config, scoring, interpret
    )  # [W, parts, K, rows, H]
    out = out[:, :, :, : queries * group_size].reshape(
        tiles.shape[0], parts, num_kv_heads, queries, group_size, head_dim
    )
    # Where each token's rows are; nowhere for what is in no tile.
    places = jnp.arange(tokens.size, dtype=jnp.int32)
    place = jnp.full((num_tokens,), tokens.size, jnp.int32)
    place = place.at[tokens.reshape(-1)].set(places, mode="drop")
    rows = out.transpose(0, 1, 3, 2, 4, 5).reshape(-1, num_kv_heads, group_size, head_dim)
    result: Array = rows.at[place].get(mode="fill", fill_value=0)
    return result


def _attend(
    q_parts: Array,
    data: Array,
    tables: Array,
    tiles: Array,
    counts: Array,
    queries: int,
    group_size: int,
    config: MosaicConfig,
    scoring: Scoring,
    interpret: Any,
) -> Array:
    """Launch the kernel; returns f32, shaped as `q_parts`. Parts without queries hold anything."""
    max_tiles, parts, num_kv_heads, _, head_dim = q_parts.shape
    dtype = q_parts.dtype
    num_readers = config.num_readers

    def ragged_paged_attention_prefill(
        q: Ref, data: Ref, tables: Ref, tiles: Ref, counts: Ref, out: Ref,
        q_smem: Ref, out_smem: Ref, weights_smem: Ref, q_full: Ref, *ring_refs: Ref,
    ) -> None:  # fmt: skip
        tile, part = lax.axis_index("tile"), lax.axis_index("part")
        kv_head, warpgroup = lax.axis_index("kv_head"), lax.axis_index("warpgroup")
        ring = Ring(*ring_refs)
        seq, first_position, left = tiles[tile, 0], tiles[tile, 2], tiles[tile, 3]
        first_query = part * queries

        @pl.when(jnp.logical_and(tile < counts[0], first_query < left))
        def attend() -> None:
            size = jnp.int32(config.tile)
            end = first_position + jnp.minimum(first_query + queries, left)
            # Tiles are counted from the first that some row sees.
            begin = lax.div(scoring.first_visible(first_position + first_query), size) * size
            num_visits = lax.div(end - begin + size - 1, size)

            @pl.when(warpgroup == num_readers)
            def fetch() -> None:
                def fetch_tile(number: Array, carry: None) -> None:
                    ring.fill(
                        number, data, tables, counts[1], seq, kv_head, begin + number * size, end
                    )

                lax.fori_loop(0, num_visits, fetch_tile, None)
                ring.drain(num_visits)

            @pl.when(warpgroup < num_readers)
            def multiply() -> None:
                rows = pl.ds(pl.multiple_of(warpgroup * ROWS, ROWS), ROWS)
                own_q = q_smem.at[warpgroup]
                plgpu.copy_gmem_to_smem(
                    q.at[tile, part, kv_head, rows], own_q, q_full.at[warpgroup]
                )
                plgpu.barrier_wait(q_full.at[warpgroup])
                own_weights = weights_smem.at[warpgroup] if interpret else None

                def visit(number: Array, carry: Any, *, masked: bool) -> Any:
                    visible = None
                    if masked:
                        shape = (ROWS, config.tile)
                        iota = functools.partial(
                            plgpu.broadcasted_iota, jnp.int32, shape, layout=plgpu.Layout.WGMMA
                        )
                        row = iota(0) + warpgroup * ROWS
                        # The last position that a row may see. Rows past the last query see what
                        # it sees: nothing that is unwritten.
                        seen = first_position + first_query + lax.div(row, jnp.int32(group_size))
                        visible = scoring.visible(
                            iota(1) + begin + number * size, jnp.minimum(seen, end - 1)
                        )
                    return ring.visit(number, own_q, own_weights, visible, scoring, carry)

                # All rows see all of a tile that ends before the first query. With a window every
                # tile is masked: another loop for its beginning spills registers.
                num_whole = jnp.int32(0)
                carry = nothing(head_dim)
                if scoring.sliding_window is None:
                    num_whole = lax.div(first_position + first_query + 1, size)
                    carry = lax.fori_loop(
                        0, num_whole, functools.partial(visit, masked=False), carry
                    )
                acc, _, total = lax.fori_loop(
                    num_whole, num_visits, functools.partial(visit, masked=True), carry
                )
                own_out = out_smem.at[warpgroup]
                own_out[...] = acc / lax.broadcast_in_dim(total, acc.shape, [0])
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(own_out, out.at[tile, part, kv_head, rows])
                plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        ragged_paged_attention_prefill,
        out_type=jax.ShapeDtypeStruct(q_parts.shape, jnp.float32),
        scratch_types=(
            plgpu.SMEM((num_readers, ROWS, head_dim), dtype, transforms=swizzled(dtype)),
            plgpu.SMEM(
                (num_readers, ROWS, head_dim), jnp.float32, transforms=swizzled(jnp.float32)
            ),
            weights_scratch(config, dtype, interpret),
            plgpu.Barrier(num_barriers=num_readers),
            *Ring.scratch(config, head_dim, data.shape[3], dtype, readers=num_readers),
        ),
        grid=(max_tiles, parts, num_kv_heads),
        grid_names=("tile", "part", "kv_head"),
        num_threads=num_readers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    out: Array = kernel(q_parts, data, tables, tiles, counts)
    return out
