"""Logits of decoders through paged KV caches: how far they are off, and how long they take.

Unlike the other measurements this looks inside the engine: no server tells all its logits.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import ArrayLike, NDArray

from jaxengine.models.config import ModelConfig
from jaxengine.models.decoder import Decoder
from kernels_pallas.kv_cache import KVCache, KVCacheDtype
from kernels_pallas.ragged_paged_attention import new_kv_cache
from kernels_pallas.work_plan import (
    AttentionBatch,
    max_decode_splits,
    max_prefill_tiles,
    plan_decode_splits,
    plan_prefill_tiles,
)

__all__ = [
    "BLOCK_SIZE",
    "CHUNK",
    "LOSS_HEADINGS",
    "GoldenCase",
    "LogitLoss",
    "Losses",
    "PagedDecoder",
    "count_kept",
    "longest_text",
    "loss_cells",
    "measure_losses",
    "time_steps",
]

BLOCK_SIZE = 16
CHUNK = 128

LOSS_HEADINGS = ("logit error\nmean", "max", "KL\nnats", "same\nargmax", "perplexity")

Losses = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class GoldenCase:
    """A prompt and the greedy answer that another implementation gave in float32."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LogitLoss:
    """What logits lose against a reference, over all positions of a text.

    Attributes:
        max_error, mean_error: absolute, over the vocabulary too.
        kl_divergence: mean, in nats.
        agreement: share of positions with the same likeliest token.
        perplexity: of the text.
    """

    max_error: float
    mean_error: float
    kl_divergence: float
    agreement: float
    perplexity: float

    @classmethod
    def of(cls, losses: Losses) -> "LogitLoss":
        """Sum up what `measure_losses` found."""
        means = {name: float(values.astype(np.float64).mean()) for name, values in losses.items()}
        return cls(
            max_error=float(losses["max_error"].max()),
            mean_error=means["mean_error"],
            kl_divergence=means["kl_divergence"],
            agreement=means["agrees"],
            perplexity=math.exp(means["surprise"]),
        )


def loss_cells(loss: LogitLoss) -> tuple[str, ...]:
    """Cells of a table under LOSS_HEADINGS."""
    return (
        f"{loss.mean_error:.4f}",
        f"{loss.max_error:.2f}",
        f"{loss.kl_divergence:.1e}",
        f"{loss.agreement:.2%}",
        f"{loss.perplexity:.3f}",
    )


class PagedDecoder:
    """A decoder with a cache of one dtype, for one sequence after the other.

    Args:
        decoder: with weights of any kind.
        model: its configuration.
        dtype: of the cache.
        max_len: tokens of the longest sequence.
    """

    def __init__(
        self, decoder: Decoder, model: ModelConfig, dtype: KVCacheDtype, *, max_len: int
    ) -> None:
        self._graph, self._weights = nnx.split(decoder)
        self._num_blocks = math.ceil(max_len / BLOCK_SIZE) + 1
        self._cache = _new_cache(model, dtype, self._num_blocks)

    def logits(self, token_ids: Sequence[int], first_position: int) -> jax.Array:
        """Append at most CHUNK tokens; return their logits, f32[CHUNK, V], padded.

        Position 0 begins a new sequence: nothing can be seen of the one before.
        """
        count = len(token_ids)
        ids, positions = np.zeros(CHUNK, np.int32), np.zeros(CHUNK, np.int32)
        ids[:count] = token_ids
        positions[:count] = np.arange(first_position, first_position + count)
        starts, lens = np.array([0, count], np.int32), np.array([first_position + count], np.int32)
        tiles = np.zeros((max_prefill_tiles(CHUNK, 1), 4), np.int32)
        num_tiles = plan_prefill_tiles(starts, lens, 0, tiles)
        batch = _batch(
            # The sequence has the blocks from 1 on, in order.
            slot_mapping=np.where(np.arange(CHUNK) < count, positions + BLOCK_SIZE, 0),
            query_start_loc=starts,
            seq_lens=lens,
            block_tables=np.arange(1, self._num_blocks, dtype=np.int32)[None],
            num_decodes=0,
            prefill_tiles=tiles,
            num_prefill_tiles=num_tiles,
            decode_splits=np.zeros((max_decode_splits(1), 3), np.int32),
            split_starts=np.zeros(2, np.int32),
        )
        logits: jax.Array
        logits, self._cache = _run(
            self._graph, self._weights, ids, positions, self._cache, batch, decode_only=False
        )
        return logits


def longest_text(windows: Sequence[Sequence[int]], cases: Sequence[GoldenCase]) -> int:
    """Return the tokens of the longest text that `measure_losses` and `count_kept` will see."""
    return max(
        *map(len, windows), *(len(case.prompt_ids) + len(case.output_ids) for case in cases), 1
    )


def measure_losses(
    reference: PagedDecoder,
    others: Mapping[str, PagedDecoder],
    windows: Sequence[Sequence[int]],
) -> dict[str, Losses]:
    """Compare some decoders with a reference at every position that has a next token.

    Args:
        reference: what is right.
        others: to measure, by name.
        windows: token ids of pieces of a text, each of at least two.

    Returns:
        For each of the others f32[positions] by name: "max_error" and "mean_error" of the logits
        over the vocabulary, "kl_divergence" in nats, "agrees" (1 where the likeliest token is the
        same) and "surprise", -log of the probability of the token that follows.
    """
    found: dict[str, list[Losses]] = {name: [] for name in others}
    for window in windows:
        for first in range(0, len(window) - 1, CHUNK):
            # The last token is only a target.
            token_ids = window[first : min(first + CHUNK, len(window) - 1)]
            count = len(token_ids)
            targets = np.zeros(CHUNK, np.int32)
            targets[:count] = window[first + 1 : first + 1 + count]
            expected = reference.logits(token_ids, first)
            for name, other in others.items():
                compared = _compare(expected, other.logits(token_ids, first), targets)
                found[name].append({k: np.asarray(v)[:count] for k, v in compared.items()})
    return {
        name: {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        for name, parts in found.items()
    }


def count_kept(paged: PagedDecoder, cases: Sequence[GoldenCase]) -> int:
    """Count the golden answers that greedy decoding gives.

    It gives one exactly if each of its tokens is the likeliest after those before it. Chunks give
    the bits of single steps, so one pass over prompt and answer tells.
    """
    kept = 0
    for case in cases:
        text = (*case.prompt_ids, *case.output_ids)
        chosen: list[int] = []
        for first in range(0, len(text), CHUNK):
            token_ids = text[first : first + CHUNK]
            likeliest = np.asarray(paged.logits(token_ids, first).argmax(-1))
            chosen.extend(likeliest[: len(token_ids)].tolist())
        kept += tuple(chosen[len(case.prompt_ids) - 1 : -1]) == case.output_ids
    return kept


def time_steps(
    decoder: Decoder,
    model: ModelConfig,
    dtypes: Sequence[KVCacheDtype],
    *,
    num_seqs: int,
    context: int,
    repeats: int,
) -> dict[KVCacheDtype, tuple[float, float]]:
    """Time decode steps, the dtypes in turn so that all see the same machine.

    Returns:
        Median and smallest milliseconds of a step, logits included, without sampling.
    """
    graph, weights = nnx.split(decoder)
    blocks_per_seq = math.ceil(context / BLOCK_SIZE)
    num_blocks = num_seqs * blocks_per_seq + 1
    tables = np.arange(1, num_blocks, dtype=np.int32).reshape(num_seqs, blocks_per_seq)
    position = context - 1
    lens = np.full(num_seqs, context, np.int32)
    splits = np.zeros((max_decode_splits(num_seqs), 3), np.int32)
    split_starts = np.zeros(num_seqs + 1, np.int32)
    plan_decode_splits(lens, num_seqs, splits, split_starts)
    batch = _batch(
        slot_mapping=tables[:, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE,
        query_start_loc=np.arange(num_seqs + 1, dtype=np.int32),
        seq_lens=lens,
        block_tables=tables,
        num_decodes=num_seqs,
        prefill_tiles=np.zeros((max_prefill_tiles(num_seqs, num_seqs), 4), np.int32),
        num_prefill_tiles=0,
        decode_splits=splits,
        split_starts=split_starts,
    )
    ids = np.arange(num_seqs, dtype=np.int32)
    positions = np.full(num_seqs, position, np.int32)
    caches = {dtype: _new_cache(model, dtype, num_blocks) for dtype in dtypes}
    times: dict[KVCacheDtype, list[float]] = {dtype: [] for dtype in dtypes}
    for round_index in range(repeats + 1):
        for dtype in dtypes:
            start = time.perf_counter()
            logits, caches[dtype] = _run(
                graph, weights, ids, positions, caches[dtype], batch, decode_only=True
            )
            logits.block_until_ready()
            if round_index:  # the first one compiles
                times[dtype].append((time.perf_counter() - start) * 1e3)
    return {dtype: (median(entries), min(entries)) for dtype, entries in times.items()}


def _new_cache(model: ModelConfig, dtype: KVCacheDtype, num_blocks: int) -> KVCache:
    return new_kv_cache(
        num_layers=model.num_layers,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
    )


def _batch(**arrays: ArrayLike) -> AttentionBatch:
    return AttentionBatch(**{name: jnp.asarray(x, jnp.int32) for name, x in arrays.items()})


@partial(jax.jit, static_argnames=("graph", "decode_only"), donate_argnames="kv_cache")
def _run(
    graph: nnx.GraphDef[Decoder],
    weights: nnx.State[Any, Any],
    token_ids: jax.Array,
    positions: jax.Array,
    kv_cache: KVCache,
    batch: AttentionBatch,
    *,
    decode_only: bool,
) -> tuple[jax.Array, KVCache]:
    """Return the logits of all packed tokens, and the cache with their K and V."""
    decoder = nnx.merge(graph, weights)
    hidden, kv_cache = decoder(token_ids, positions, kv_cache, batch, decode_only=decode_only)
    return decoder.logits(hidden), kv_cache


@jax.jit
def _compare(
    expected_TV: jax.Array, logits_TV: jax.Array, targets_T: jax.Array
) -> dict[str, jax.Array]:
    """Return one number for each token."""
    error_TV = jnp.abs(logits_TV - expected_TV)
    log_p_TV = jax.nn.log_softmax(expected_TV)
    log_q_TV = jax.nn.log_softmax(logits_TV)
    return {
        "max_error": error_TV.max(-1),
        "mean_error": error_TV.mean(-1),
        "kl_divergence": (jnp.exp(log_p_TV) * (log_p_TV - log_q_TV)).sum(-1),
        "agrees": (expected_TV.argmax(-1) == logits_TV.argmax(-1)).astype(jnp.float32),
        "surprise": -jnp.take_along_axis(log_q_TV, targets_T[:, None], axis=1)[:, 0],
    }
