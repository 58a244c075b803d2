"""Whether the halves of a decoder layer give right answers; part of `self_test`.

The expected values are plain NumPy, in float64: a whole sequence at once, without a cache. The
layer under test gets two sequences in chunks, the second of two layers, and a bucket with room.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kernels_pallas import int8
from kernels_pallas.kv_cache import KVCacheDtype
from kernels_pallas.native_layer import (
    AttentionWeights,
    Halves,
    MLPWeights,
    PackedWeights,
    run_layers,
)
from kernels_pallas.projection import pack, packed_shape
from kernels_pallas.ragged_paged_attention import new_kv_cache
from kernels_pallas.work_plan import AttentionBatch

__all__ = ["find_layer_fault", "plain_attention"]

WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 6, 2, 64
NUM_LAYERS, LAYER, BLOCK_SIZE, NUM_BLOCKS, BUCKET = 2, 1, 16, 16, 48
EPS = 1e-5
HALVES: tuple[Halves, ...] = ("attention", "mlp")
# Steps as (tokens of the first sequence, of the second); the shorter comes first in the batch.
STEPS = ((0, 33), (1, 7), (3, 1), (1, 1))
# Shares of the root mean square of what is expected. A number that float32 moves over the middle
# between two is rounded the other way, by 2^-8 of it, or by 1/127 of the largest of its row.
MEAN_TOLERANCE, LARGEST_TOLERANCE = 5e-3, 8e-2

Doubles = NDArray[np.float64]


def find_layer_fault(
    weight_dtype: Literal["bfloat16", "int8"],
    *,
    kv_cache_dtype: KVCacheDtype = "float32",
    is_plain: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> str | None:
    """Run both halves over some steps; return what is wrong with the results.

    Args:
        weight_dtype: of the matrices.
        kv_cache_dtype: float32 loses nothing, so that the tolerance is that of the products.
        is_plain: no biases, norms of heads or GELU, and sums with the residual stream.
        sliding_window: as of run_layers.
        soft_cap: likewise.
    """
    rng = np.random.default_rng(0)
    matrix = partial(_Matrix, rng, weight_dtype)
    qkv = matrix((HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH)
    out, gate_up, down = (
        matrix(WIDTH, HEADS * HEAD_DIM),
        matrix(2 * HIDDEN, WIDTH),
        matrix(WIDTH, HIDDEN),
    )
    norms = {name: rng.uniform(0.5, 2, (NUM_LAYERS, WIDTH)) for name in ("attention", "mlp")}
    head_norms = rng.uniform(0.5, 2, (2, NUM_LAYERS, HEAD_DIM))
    bias = rng.standard_normal((NUM_LAYERS, len(qkv.values)))
    attention = AttentionWeights(
        norm=_f32(norms["attention"]),
        qkv=qkv.packed,
        qkv_bias=None if is_plain else _f32(bias),
        q_norm=None if is_plain else _f32(head_norms[0]),
        k_norm=None if is_plain else _f32(head_norms[1]),
        out=out.packed,
    )
    mlp = MLPWeights(_f32(norms["mlp"]), gate_up.packed, down.packed)
    run = jax.jit(
        partial(
            run_layers,
            layers=jnp.array([LAYER, LAYER + 1]),
            eps=EPS,
            scale=HEAD_DIM**-0.5,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            is_gelu=not is_plain,
            adds=is_plain,
        ),
        static_argnames="halves",
        donate_argnums=4,
    )
    cache = new_kv_cache(
        num_layers=NUM_LAYERS,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=kv_cache_dtype,
        kernel="native",
    )
    lengths = np.cumsum([(0, 0), *STEPS], axis=0)
    streams = [rng.standard_normal((n, WIDTH)) * rng.uniform(0.1, 9, (n, 1)) for n in lengths[-1]]
    results: dict[Halves, list[list[Doubles]]] = {"attention": [[], []], "mlp": [[], []]}
    for before, after in pairwise(lengths):
        x, rope, batch = _step(streams, before, after)
        # One slot more than there are tokens, as a static batch has them.
        num_slots = jnp.int32((after - before).sum() + 1)
        computed_of: dict[Halves, jax.Array] = {}
        for name in HALVES:
            computed_of[name], cache, _ = run(
                x, attention, mlp, rope, cache, batch, num_slots, halves=name
            )
        if is_plain:
            whole, cache, _ = run(x, attention, mlp, rope, cache, batch, num_slots)
            attended = computed_of["attention"]
            in_halves, cache, _ = run(
                attended, attention, mlp, rope, cache, batch, num_slots, halves="mlp"
            )
            if (whole != in_halves).any():
                return f"{weight_dtype} layer: other numbers than its halves"
        for name, computed in computed_of.items():
            if not np.isfinite(computed).all():
                return f"{weight_dtype} layer, {name}: something that is not finite"
            first = after[0] - before[0]
            results[name][0].append(np.asarray(computed)[:first])
            results[name][1].append(np.asarray(computed)[first : first + after[1] - before[1]])

    def expected_attention(x: Doubles) -> Doubles:
        heads = qkv.times(_normalized(x, norms["attention"][LAYER]))
        heads = (heads if is_plain else heads + bias[LAYER]).reshape(len(x), -1, HEAD_DIM)
        q, k, v = np.split(heads, [HEADS, HEADS + KV_HEADS], axis=1)
        if not is_plain:
            q, k = (_normalized(x, head_norms[i, LAYER]) for i, x in enumerate((q, k)))
        attended = plain_attention(
            _rotated(q), _rotated(k), v, sliding_window=sliding_window, soft_cap=soft_cap
        )
        return out.times(attended.reshape(len(x), -1))

    def expected_mlp(x: Doubles) -> Doubles:
        gate, up = np.split(gate_up.times(_normalized(x, norms["mlp"][LAYER])), 2, axis=1)
        cube = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        share = 1 / (1 + np.exp(-gate)) if is_plain else (1 + np.tanh(cube)) / 2
        return down.times(gate * share * up)

    expected: dict[Halves, Callable[[Doubles], Doubles]] = {
        "attention": expected_attention,
        "mlp": expected_mlp,
    }
    for name, chunks in results.items():
        for stream, parts in zip(streams, chunks, strict=True):
            half = expected[name](stream)
            error = np.abs(np.concatenate(parts) - (half + stream if is_plain else half))
            error /= np.sqrt((half**2).mean())
            # Not at most, so that what is not a number is a fault as well.
            if not (error.mean() <= MEAN_TOLERANCE and error.max() <= LARGEST_TOLERANCE):
                return f"{weight_dtype} layer, {name}: wrong by {error.max():.2g}"
    return None


class _Matrix:
    """Random weights of the layer under test; those of the other layer are their negatives."""

    def __init__(
        self, rng: np.random.Generator, dtype: str, num_outputs: int, num_inputs: int
    ) -> None:
        w = rng.standard_normal((num_outputs, num_inputs)) * num_inputs**-0.5
        self.is_int8 = dtype == "int8"
        scales = None
        if self.is_int8:
            numbers, scales = int8.quantize(w)
            self.values = numbers * scales[:, None].astype(np.float64)
        else:
            numbers = w.astype(ml_dtypes.bfloat16)
            self.values = numbers.astype(np.float64)
        packed = np.empty(
            packed_shape(*w.shape, dtype=numbers.dtype, num_layers=NUM_LAYERS), numbers.dtype
        )
        for layer in range(NUM_LAYERS):
            pack(numbers if layer == LAYER else -numbers, packed[layer])
        stacked = None if scales is None else _f32(np.tile(scales, (NUM_LAYERS, 1)))
        self.packed = PackedWeights(jnp.asarray(packed), stacked)

    def times(self, x: Doubles) -> Doubles:
        """The product of rows that are rounded as the dtype has it."""
        if self.is_int8:
            rotated = int8.rotate(x)
            steps = np.abs(rotated).max(axis=1, keepdims=True) / 127
            rounded: Doubles = np.rint(rotated / steps) * steps
        else:
            rounded = x.astype(ml_dtypes.bfloat16).astype(np.float64)
        product: Doubles = rounded @ self.values.T
        return product


def _step(
    streams: list[Doubles], before: NDArray[np.int64], after: NDArray[np.int64]
) -> tuple[jax.Array, tuple[jax.Array, jax.Array], AttentionBatch]:
    """Pack the tokens [before, after) of both sequences; sequence s has blocks s + 1, s + 3, ..."""
    x = np.full((BUCKET, WIDTH), 3.0, np.float32)
    slots, positions = np.zeros((2, BUCKET), np.int64)
    starts = np.concatenate([[0], np.cumsum(after - before), [(after - before).sum()]])
    tables = np.arange(NUM_BLOCKS // 2) * 2 + np.array([[1], [2], [1]])
    tables %= NUM_BLOCKS
    for sequence in range(2):
        rows = slice(starts[sequence], starts[sequence + 1])
        of = np.arange(before[sequence], after[sequence])
        x[rows], positions[rows] = streams[sequence][of], of
        slots[rows] = tables[sequence, of // BLOCK_SIZE] * BLOCK_SIZE + of % BLOCK_SIZE
    lengths = np.where(after > before, after, 0)
    # The plans of other kernels are not read.
    arrays = dict.fromkeys(AttentionBatch._fields, np.zeros(0, np.int32)) | {
        "slot_mapping": slots,
        "query_start_loc": starts,
        "seq_lens": np.append(lengths, 0),
        "block_tables": tables,
    }
    batch = AttentionBatch(**{name: jnp.asarray(a, jnp.int32) for name, a in arrays.items()})
    angles = _angles(positions)[:, None]
    return jnp.asarray(x), (_f32(np.cos(angles)), _f32(np.sin(angles))), batch


def _angles(positions: NDArray[np.int64]) -> Doubles:
    half = HEAD_DIM // 2
    angles: Doubles = positions[:, None] * 1e4 ** (-np.arange(half) / half)
    return angles


def _normalized(x: Doubles, scale: Doubles) -> Doubles:
    normalized: Doubles = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS) * scale
    return normalized


def _rotated(x: Doubles) -> Doubles:
    """Multiply the pairs (first half, second half) of each head, as complex numbers."""
    first, second = np.split(x, 2, axis=-1)
    turned = (first + 1j * second) * np.exp(1j * _angles(np.arange(len(x))))[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def plain_attention[T: np.floating](
    q: NDArray[T],
    k: NDArray[T],
    v: NDArray[T],
    *,
    sliding_window: int | None,
    soft_cap: float | None,
) -> NDArray[T]:
    """Return causal attention of a whole sequence; [tokens, heads, head dim] each."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("qnh,knh->nqk", q, k) * q.shape[-1] ** -0.5
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    distance = np.arange(len(q))[:, None] - np.arange(len(k))
    scores[:, (distance < 0) | (distance >= (sliding_window or len(k)))] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    attended: NDArray[T] = np.einsum("nqk,knh->qnh", weights, v)
    return attended


def _f32(x: NDArray[np.floating]) -> jax.Array:
    return jnp.asarray(x, jnp.float32)
