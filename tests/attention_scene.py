"""Sequences over a paged, poisoned KV cache, and what attention over them must give."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from compile_cache import use_compile_cache
from kernels_pallas.kv_cache import AttentionKernel, KVCache, KVCacheDtype
from kernels_pallas.ragged_paged_attention import (
    new_kv_cache,
    ragged_paged_attention,
    write_kv,
)
from kernels_pallas.work_plan import (
    AttentionBatch,
    max_decode_splits,
    max_prefill_tiles,
    plan_decode_splits,
    plan_prefill_tiles,
)

KV_CACHE_DTYPES = get_args(KVCacheDtype)

# Free blocks and the tails of used ones hold this: far from every real key and value, but finite,
# as a real cache is. One leaked token would show in every digit. Eight-bit dtypes get what is not
# even a number: the pattern of NaN, or scales that are NaN.
POISON = 3e4
POISON_BYTE = 0x7F

attend = jax.jit(
    ragged_paged_attention,
    static_argnames=("num_kv_heads", "scale", "decode_only", "sliding_window", "soft_cap"),
)
write = jax.jit(write_kv)


class Context(NamedTuple):
    """Queries, keys and values of one sequence at all its positions."""

    q: NDArray[np.float32]  # [L, N, H]
    k: NDArray[np.float32]  # [L, K, H]
    v: NDArray[np.float32]  # [L, K, H]


class Chunk(NamedTuple):
    """Positions [start, end) of a context in one step; its first `end` tokens are in `blocks`."""

    context: Context
    start: int
    end: int
    blocks: tuple[int, ...]


def random_context(
    seed: int,
    length: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
) -> Context:
    rng = np.random.default_rng(seed)
    shapes = [(length, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    return Context(*(rng.standard_normal(shape, np.float32) for shape in shapes))


def stored(x: NDArray[np.float32], dtype: str) -> NDArray[np.float64]:
    """What a cache of the dtype remembers of keys or values that are within its range."""
    if dtype == "int8":
        steps, scales = quantized(x)
        return steps.astype(np.float64) * scales.astype(np.float64)[..., None]
    name = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(dtype, dtype)
    return x.astype(name).astype(np.float64)


def quantized(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.generic]]:
    """Integers of the last axis, and the scale that makes the largest of them 127."""
    scales = (np.abs(x).max(-1) / np.float32(127)).astype(ml_dtypes.bfloat16)
    return np.rint(x / scales.astype(np.float32)[..., None]).astype(np.int8), scales


def expected(
    context: Context,
    dtype: str = "float32",
    *,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> NDArray[np.float64]:
    """Causal attention at every position, in float64 and without any trick."""
    q, k, v = context.q.astype(np.float64), stored(context.k, dtype), stored(context.v, dtype)
    group_size = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group_size, axis=1) for x in (k, v))
    scores = np.einsum("qnh,knh->nqk", q, k) * q.shape[-1] ** -0.5
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    position = np.arange(len(q))
    distance = position[:, None] - position
    scores[:, (distance < 0) | (distance >= (sliding_window or len(q)))] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("nqk,knh->qnh", weights, v)


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Sizes of a paged cache, and of the bucket that reads it."""

    num_tokens: int
    num_seqs: int
    dtype: KVCacheDtype = "float32"
    kernel: AttentionKernel = "reference"
    block_size: int = 16
    num_blocks: int = 64
    max_blocks: int = 16
    num_layers: int = 1
    layer: int = 0
    sliding_window: int | None = None
    soft_cap: float | None = None

    def expected(self, context: Context) -> NDArray[np.float64]:
        """Attention at every position, over what this cache remembers of the context."""
        return expected(
            context, self.dtype, sliding_window=self.sliding_window, soft_cap=self.soft_cap
        )

    def run(
        self, chunks: Sequence[Chunk], *, decode_only: bool = False
    ) -> tuple[list[NDArray[np.float32]], NDArray[np.float32]]:
        """Attend; return the rows of each chunk, and the padding rows.

        Chunks of one token are packed first, as the contract wants it.
        """
        use_compile_cache()
        order = sorted(range(len(chunks)), key=lambda i: chunks[i].end - chunks[i].start > 1)
        q, batch = self.pack([chunks[i] for i in order])
        out = self.attend(q, self.filled(chunks), batch, decode_only=decode_only)
        rows: dict[int, NDArray[np.float32]] = {}
        start = 0
        for index in order:
            end = start + chunks[index].end - chunks[index].start
            rows[index] = out[start:end]
            start = end
        return [rows[i] for i in range(len(chunks))], out[start:]

    def attend(
        self,
        q: NDArray[np.generic],
        kv_cache: KVCache,
        batch: AttentionBatch,
        *,
        decode_only: bool = False,
    ) -> NDArray[np.float32]:
        """Call the function under test."""
        out = attend(
            q,
            kv_cache,
            batch,
            first_block=jnp.int32(self.layer * self.num_blocks),
            num_kv_heads=kv_cache.data.shape[2],
            scale=q.shape[-1] ** -0.5,
            decode_only=decode_only,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
        )
        return np.asarray(out)

    def filled(self, chunks: Sequence[Chunk]) -> KVCache:
        """Return a cache that holds the tokens of the chunks so far, and poison elsewhere."""
        context = chunks[0].context
        kv_cache = poisoned(
            new_kv_cache(
                num_layers=self.num_layers,
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                num_kv_heads=context.k.shape[1],
                head_dim=context.k.shape[2],
                dtype=self.dtype,
                kernel=self.kernel,
            )
        )
        for chunk in chunks:
            # Padded to one length, so that one program serves: padding goes to block 0.
            padding = self.max_blocks * self.block_size - chunk.end
            rows = ((0, padding), (0, 0), (0, 0))
            kv_cache = write(
                kv_cache,
                np.pad(chunk.context.k[: chunk.end], rows),
                np.pad(chunk.context.v[: chunk.end], rows),
                np.pad(self.slots(chunk.blocks, 0, chunk.end), (0, padding)),
                first_block=jnp.int32(self.layer * self.num_blocks),
            )
        return kv_cache

    def slots(self, blocks: Sequence[int], start: int, end: int) -> NDArray[np.int32]:
        positions = np.arange(start, end, dtype=np.int32)
        table = np.asarray(blocks, np.int32)
        return table[positions // self.block_size] * self.block_size + positions % self.block_size

    def pack(self, chunks: Sequence[Chunk]) -> tuple[NDArray[np.generic], AttentionBatch]:
        """Build the arrays of a step by the contract."""
        T, S = self.num_tokens, self.num_seqs
        lens = [chunk.end - chunk.start for chunk in chunks]
        query_start_loc = np.full(S + 1, sum(lens), np.int32)
        query_start_loc[: len(lens) + 1] = np.cumsum([0, *lens])
        seq_lens = np.zeros(S, np.int32)
        seq_lens[: len(lens)] = [chunk.end for chunk in chunks]
        # Entries past a sequence's length may hold anything: here the last block.
        tables = np.full((S, self.max_blocks), self.num_blocks - 1, np.int32)
        slots = np.zeros(T, np.int32)
        q = np.full((T, *chunks[0].context.q.shape[1:]), 7, chunks[0].context.q.dtype)
        for seq, (chunk, start) in enumerate(zip(chunks, query_start_loc, strict=False)):
            rows = slice(start, start + lens[seq])
            needed = -(-chunk.end // self.block_size)
            tables[seq, :needed] = chunk.blocks[:needed]
            slots[rows] = self.slots(chunk.blocks, chunk.start, chunk.end)
            q[rows] = chunk.context.q[chunk.start : chunk.end]
        num_decodes = lens.count(1)
        tiles = np.zeros((max_prefill_tiles(T, S), 4), np.int32)
        num_tiles = plan_prefill_tiles(
            query_start_loc[: len(lens) + 1], seq_lens[: len(lens)], num_decodes, tiles
        )
        splits = np.zeros((max_decode_splits(S), 3), np.int32)
        split_starts = np.zeros(S + 1, np.int32)
        plan_decode_splits(seq_lens, num_decodes, splits, split_starts)
        window_splits, window_starts = None, None
        if (window := self.sliding_window) is not None:
            window_splits = np.zeros((max_decode_splits(S, sliding_window=window), 3), np.int32)
            window_starts = np.zeros(S + 1, np.int32)
            plan_decode_splits(
                seq_lens, num_decodes, window_splits, window_starts, sliding_window=window
            )
        return q, AttentionBatch(
            slot_mapping=slots,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=tables,
            num_decodes=np.int32(num_decodes),
            prefill_tiles=tiles,
            num_prefill_tiles=np.int32(num_tiles),
            decode_splits=splits,
            split_starts=split_starts,
            window_splits=window_splits,
            window_split_starts=window_starts,
        )


def poisoned(kv_cache: KVCache) -> KVCache:
    """A cache that holds nothing that anybody may see."""
    poison = POISON if kv_cache.data.dtype.itemsize > 1 else POISON_BYTE
    return KVCache(
        jnp.full_like(kv_cache.data, poison),
        None if kv_cache.scales is None else jnp.full_like(kv_cache.scales, jnp.nan),
        kv_cache.dtype,
        kv_cache.kernel,
    )


def shuffled_blocks(seed: int, counts: Sequence[int], num_blocks: int) -> list[tuple[int, ...]]:
    """Hand out blocks in random order, never the reserved block 0."""
    free = np.random.default_rng(seed).permutation(np.arange(1, num_blocks)).tolist()
    return [tuple(free.pop() for _ in range(count)) for count in counts]
