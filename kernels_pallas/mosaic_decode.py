"""Decodes on Hopper, through Pallas' Mosaic GPU backend: two kernels.

`attend_to_splits`: as many programs as the GPU holds at once take (split, kv head) pairs in turn.
In each, one warpgroup fetches blocks of K and V by TMA into a ring of tiles in shared memory, and
does not stop between splits; the other multiplies. The query heads of a kv head are the first of
the 64 rows that the matrix units take.

`merge`: adds the splits of each sequence in order, for 64 rows of kv heads times query heads.

A barrier of the ring is waited for once for each time that it completes, also at the end: the
interpreter insists on it.
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
from kernels_pallas.tuning import MosaicConfig

__all__ = [
    "ROWS",
    "Ring",
    "attend_to_splits",
    "merge",
    "nothing",
    "swizzled",
    "weights_scratch",
]

Ref = Any  # Pallas' references have no public type

# Rows of a product: what one warpgroup's matrix instruction takes.
ROWS = 64

# A masked score. Finite, so that nothing becomes NaN.
MASKED = -1e30

# Splits that are on their way while `merge` adds; bounded by shared memory for heads of 256.
MERGE_SLOTS = 3


def swizzled(dtype: Any, columns: int = 128) -> tuple[Any, ...]:
    """Return how a matrix of so many columns lies in shared memory for TMA and matrix units."""
    itemsize = jnp.dtype(dtype).itemsize
    num_bytes = min(128, columns * itemsize)
    return (
        plgpu.TilingTransform((8, num_bytes // itemsize)),  # type: ignore[abstract]
        plgpu.SwizzleTransform(num_bytes),  # type: ignore[abstract]
    )


class Ring:
    """Tiles of K and V in shared memory, filled by one warpgroup and read by others.

    Tiles are counted through a program's life; tile number n lies in slot n % num_slots.
    """

    def __init__(self, k: Ref, v: Ref, k_full: Ref, v_full: Ref, k_free: Ref, v_free: Ref) -> None:
        self.k, self.v = k, v
        self.k_full, self.v_full = k_full, v_full
        self.k_free, self.v_free = k_free, v_free
        self.num_slots, self.tile = k.shape[0], k.shape[1]

    @staticmethod
    def scratch(
        config: MosaicConfig, head_dim: int, block_size: int, dtype: Any, *, readers: int
    ) -> tuple[Any, ...]:
        """Return what a kernel must allocate, in the order of the constructor."""
        tiles = plgpu.SMEM(
            (config.num_slots, config.tile, head_dim), dtype, transforms=swizzled(dtype)
        )
        full = plgpu.Barrier(
            num_arrivals=config.tile // min(block_size, config.tile), num_barriers=config.num_slots
        )
        free = plgpu.Barrier(num_arrivals=readers, num_barriers=config.num_slots)
        return tiles, tiles, full, full, free, free

    def slot(self, number: Array) -> Array:
        return lax.rem(number, jnp.int32(self.num_slots))

    def fill(
        self,
        number: Array,
        data: Ref,
        tables: Ref,
        first_block: Array,
        seq: Array,
        kv_head: Array,
        position: Array,
        end: Array,
    ) -> None:
        """Fetch the tile at `position` once its slot is free.

        Blocks past `end` are not touched; the last one comes instead and is masked.
        """
        slot = self.slot(number)

        @pl.when(number >= self.num_slots)
        def _() -> None:
            plgpu.barrier_wait(self.k_free.at[slot])
            plgpu.barrier_wait(self.v_free.at[slot])

        block_size = data.shape[3]
        rows = min(block_size, self.tile)
        last = lax.div(end - 1, jnp.int32(block_size))
        for which, tiles, full in ((0, self.k, self.k_full), (1, self.v, self.v_full)):
            for start in range(0, self.tile, rows):
                place = position + start
                index = jnp.minimum(lax.div(place, jnp.int32(block_size)), last)
                offset: Array | int = 0
                if block_size > rows:
                    offset = pl.multiple_of(lax.rem(place, jnp.int32(block_size)), rows)
                plgpu.copy_gmem_to_smem(
                    data.at[
                        first_block + tables[seq, index], which, kv_head, pl.ds(offset, rows), :
                    ],
                    tiles.at[slot, pl.ds(start, rows)],
                    full.at[slot],
                )

    def drain(self, count: Array) -> None:
        """Wait until the last of `count` tiles have been read."""

        def wait(number: Array, carry: None) -> None:
            slot = self.slot(number)
            plgpu.barrier_wait(self.k_free.at[slot])
            plgpu.barrier_wait(self.v_free.at[slot])

        lax.fori_loop(jnp.maximum(count - self.num_slots, 0), count, wait, None)

    def visit(
        self,
        number: Array,
        queries: Ref,
        weights_smem: Ref | None,
        visible: Array | None,
        scoring: Scoring,
        carry: tuple[Array, Array, Array],
    ) -> tuple[Array, Array, Array]:
        """Take one tile into the online softmax of 64 rows.

        Args:
            number: of the tile.
            queries: [64, H] in shared memory, scaled for base 2.
            weights_smem: [64, tile] to pass the weights through; None keeps them in registers,
                which the interpreter cannot.
            visible: bool[64, tile]; None if all are.
            scoring: what becomes of scores.
            carry: largest score and sum of weights, f32[64], and weighted values, f32[64, H].
        """
        acc, largest, total = carry
        slot = self.slot(number)
        plgpu.barrier_wait(self.k_full.at[slot])

        def multiply_keys(product: Ref) -> Array:
            plgpu.wgmma(product, queries, self.k.at[slot].T)
            result: Array = product[...]
            return result

        scores = pl.run_scoped(
            multiply_keys, plgpu.WGMMAAccumulatorRef((ROWS, self.tile), jnp.float32)
        )
        plgpu.barrier_arrive(self.k_free.at[slot])
        scores = scoring.cap(scores)
        if visible is not None:
            scores = jnp.where(visible, scores, MASKED)
        new_largest = jnp.maximum(largest, scores.max(axis=1))
        decay = jnp.exp2(largest - new_largest)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_largest, scores.shape, [0]))
        if visible is not None:
            weights = jnp.where(visible, weights, 0.0)
        total = total * decay + weights.sum(axis=1)
        acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
        rounded = weights.astype(self.v.dtype)
        if weights_smem is not None:
            weights_smem[...] = rounded
            plgpu.commit_smem()
        plgpu.barrier_wait(self.v_full.at[slot])

        def multiply_values(product: Ref) -> Array:
            plgpu.wgmma(product, rounded if weights_smem is None else weights_smem, self.v.at[slot])
            result: Array = product[...]
            return result

        acc = acc + pl.run_scoped(
            multiply_values, plgpu.WGMMAAccumulatorRef((ROWS, acc.shape[1]), jnp.float32)
        )
        plgpu.barrier_arrive(self.v_free.at[slot])
        return acc, new_largest, total


def nothing(head_dim: int) -> tuple[Array, Array, Array]:
    """Return the softmax over no positions: weighted values, largest score, sum of weights."""
    row = plgpu.Layout.WGMMA.reduce(1)
    return (
        plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), row),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), row),
    )


def attend_to_splits(
    q_SKRH: Float[Array, "S K R H"],
    data: Array,
    tables: Int[Array, "S M"],
    splits: Int[Array, "X 3"],
    split_starts: Int[Array, "S+1"],
    first_block: Int[Array, "1"],
    config: MosaicConfig,
    scoring: Scoring,
    interpret: Any,
) -> tuple[Float[Array, "X KR H"], Float[Array, "X KR"]]:
    """Attend to every split of the plan.

    Args:
        q_SKRH: queries, scaled for base 2; R is the query heads of a kv head, padded to eights.
        data: of the cache.
        tables: block ids.
        splits: of the plan.
        split_starts: of the plan.
        first_block: row of the layer's block 0.
        config: sizes.
        scoring: what becomes of scores.
        interpret: for Pallas.

    Returns:
        The mean of the values of each split, and the logarithm (base 2) of its sum of weights.
        Rows are padded to a multiple of 64; those and unused splits hold anything.
    """
    _, num_kv_heads, rows, head_dim = q_SKRH.shape
    dtype = q_SKRH.dtype
    num_splits = splits.shape[0]
    num_seqs = split_starts.shape[0] - 1
    all_rows = num_kv_heads * rows + -(num_kv_heads * rows) % ROWS
    num_programs = min(config.num_programs, num_splits * num_kv_heads)

    def ragged_paged_attention_decode(
        q: Ref, data: Ref, tables: Ref, splits: Ref, split_starts: Ref, first_block: Ref,
        means: Ref, logs: Ref, q_smem: Ref, mean_smem: Ref, log_smem: Ref, weights_smem: Ref,
        q_full: Ref, *ring_refs: Ref,
    ) -> None:  # fmt: skip
        program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        ring = Ring(*ring_refs)
        tile = jnp.int32(config.tile)
        num_items = split_starts[num_seqs] * num_kv_heads
        turns = lax.div(num_items - program + num_programs - 1, jnp.int32(num_programs))

        def item_of(turn: Array) -> tuple[Array, Array, Array, Array, Array]:
            item = program + turn * num_programs
            split = lax.div(item, jnp.int32(num_kv_heads))
            kv_head = lax.rem(item, jnp.int32(num_kv_heads))
            return split, kv_head, splits[split, 0], splits[split, 1], splits[split, 2]

        @pl.when(warpgroup == 1)
        def fetch() -> None:
            def fetch_split(turn: Array, number: Array) -> Array:
                _, kv_head, seq, start, end = item_of(turn)
                num_tiles = lax.div(end - start + tile - 1, tile)

                def fetch_tile(index: Array, carry: None) -> None:
                    ring.fill(
                        number + index, data, tables, first_block[0], seq, kv_head,
                        start + index * tile, end,
                    )  # fmt: skip

                lax.fori_loop(0, num_tiles, fetch_tile, None)
                return number + num_tiles

            ring.drain(lax.fori_loop(0, turns, fetch_split, jnp.int32(0)))

        @pl.when(warpgroup == 0)
        def multiply() -> None:
            # Rows that no query head has: zeros, so that nothing in them is NaN.
            q_smem[...] = jnp.zeros((ROWS, head_dim), dtype)

            def multiply_split(turn: Array, number: Array) -> Array:
                split, kv_head, seq, start, end = item_of(turn)
                num_tiles = lax.div(end - start + tile - 1, tile)
                last_position = scoring.query_position(splits, split_starts, seq, end)
                plgpu.commit_smem()
                plgpu.copy_gmem_to_smem(q.at[seq, kv_head], q_smem.at[pl.ds(0, rows)], q_full)
                plgpu.barrier_wait(q_full)

                def visit(index: Array, carry: Any) -> Any:
                    position = plgpu.broadcasted_iota(
                        jnp.int32, (ROWS, config.tile), 1, layout=plgpu.Layout.WGMMA
                    )
                    # From the beginning of the tile on, as the query's is then.
                    visible = scoring.visible(position, last_position - start - index * tile)
                    return ring.visit(
                        number + index,
                        q_smem,
                        weights_smem.at[0] if interpret else None,
                        visible,
                        scoring,
                        carry,
                    )

                acc, largest, total = lax.fori_loop(0, num_tiles, visit, nothing(head_dim))
                mean_smem[...] = acc / lax.broadcast_in_dim(total, acc.shape, [0])
                log_smem[...] = largest + jnp.log2(total)
                plgpu.commit_smem()
                row = pl.multiple_of(kv_head * rows, 8)
                plgpu.copy_smem_to_gmem(
                    mean_smem.at[pl.ds(0, rows)], means.at[split, pl.ds(row, rows)]
                )
                plgpu.copy_smem_to_gmem(
                    log_smem.at[pl.ds(0, rows)], logs.at[split, pl.ds(row, rows)]
                )
                plgpu.wait_smem_to_gmem(0)
                return number + num_tiles

            lax.fori_loop(0, turns, multiply_split, jnp.int32(0))

    kernel = plgpu.kernel(
        ragged_paged_attention_decode,
        out_type=(
            jax.ShapeDtypeStruct((num_splits, all_rows, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_splits, all_rows), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((ROWS, head_dim), dtype, transforms=swizzled(dtype)),
            plgpu.SMEM((ROWS, head_dim), jnp.float32, transforms=swizzled(jnp.float32)),
            plgpu.SMEM((ROWS,), jnp.float32),
            weights_scratch(config, dtype, interpret),
            plgpu.Barrier(),
            *Ring.scratch(config, head_dim, data.shape[3], dtype, readers=1),
        ),
        grid=(num_programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    means, logs = kernel(q_SKRH, data, tables, splits, split_starts, first_block)
    return means, logs


def merge(
    means: Float[Array, "X KR H"],
    logs: Float[Array, "X KR"],
    split_starts: Int[Array, "S+1"],
    interpret: Any,
) -> Float[Array, "S KR H"]:
    """Return the mean over all splits of each sequence; zeros where there is none."""
    _, all_rows, head_dim = means.shape
    num_seqs = split_starts.shape[0] - 1

    def ragged_paged_attention_merge(
        means: Ref, logs: Ref, split_starts: Ref, out: Ref,
        mean_smem: Ref, log_smem: Ref, out_smem: Ref, full: Ref,
    ) -> None:  # fmt: skip
        seq, part = lax.axis_index("seq"), lax.axis_index("part")
        first = split_starts[seq]
        count = split_starts[seq + 1] - first
        rows = pl.ds(pl.multiple_of(part * ROWS, ROWS), ROWS)

        def fetch(number: Array) -> None:
            slot = lax.rem(number, jnp.int32(MERGE_SLOTS))
            plgpu.copy_gmem_to_smem(
                means.at[first + number, rows], mean_smem.at[slot], full.at[slot]
            )
            plgpu.copy_gmem_to_smem(logs.at[first + number, rows], log_smem.at[slot], full.at[slot])

        for number in range(MERGE_SLOTS):
            pl.when(number < count)(functools.partial(fetch, jnp.int32(number)))

        def add(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            acc, largest, total = carry
            slot = lax.rem(number, jnp.int32(MERGE_SLOTS))
            plgpu.barrier_wait(full.at[slot])
            mean = plgpu.load(mean_smem.at[slot], layout=plgpu.Layout.WGMMA)
            log = plgpu.load(log_smem.at[slot], layout=plgpu.Layout.WGMMA.reduce(1))
            # All have read before the slot is filled again.
            plgpu.commit_smem()
            pl.when(number + MERGE_SLOTS < count)(functools.partial(fetch, number + MERGE_SLOTS))
            new_largest = jnp.maximum(largest, log)
            decay, weight = jnp.exp2(largest - new_largest), jnp.exp2(log - new_largest)
            acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
            acc = acc + mean * lax.broadcast_in_dim(weight, acc.shape, [0])
            return acc, new_largest, total * decay + weight

        acc, _, total = lax.fori_loop(0, count, add, nothing(head_dim))
        total = jnp.maximum(total, 1e-30)
        out_smem[...] = acc / lax.broadcast_in_dim(total, acc.shape, [0])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out.at[seq, rows])
        plgpu.wait_smem_to_gmem(0)

    f32 = swizzled(jnp.float32)
    kernel = plgpu.kernel(
        ragged_paged_attention_merge,
        out_type=jax.ShapeDtypeStruct((num_seqs, all_rows, head_dim), jnp.float32),
        scratch_types=(
            plgpu.SMEM((MERGE_SLOTS, ROWS, head_dim), jnp.float32, transforms=f32),
            plgpu.SMEM((MERGE_SLOTS, ROWS), jnp.float32),
            plgpu.SMEM((ROWS, head_dim), jnp.float32, transforms=f32),
            plgpu.Barrier(num_arrivals=2, num_barriers=MERGE_SLOTS),
        ),
        grid=(num_seqs, all_rows // ROWS),
        grid_names=("seq", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    out: Array = kernel(means, logs, split_starts)
    return out


def weights_scratch(config: MosaicConfig, dtype: Any, interpret: Any) -> Any:
    """Return room for the weights of each reader, where they cannot stay in registers.

    Elsewhere as little as there can be.
    """
    if interpret:
        shape = (config.num_readers, ROWS, config.tile)
        return plgpu.SMEM(shape, dtype, transforms=swizzled(dtype, config.tile))
    return plgpu.SMEM((1, 8, 64), dtype, transforms=swizzled(dtype))
