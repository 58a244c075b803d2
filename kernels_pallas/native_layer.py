"""The two halves of a decoder layer on CPUs, each as one call of the native library.

Between the products of a layer lie norms, the rotation of queries and keys, the write into the KV
cache, attention, a gate and two sums. XLA makes a pass over memory of each, many of them in one
thread, and its threads meet at every product. `native_source/layer.cc` hands rows from one to the
next in phases of one call: a third of the time of a step that decodes (docs/decisions/0025).

Weights of all layers lie in one array each, packed as `projection` has it, and a call is told which
layer is meant: a program can go through the layers in a loop without a copy of their weights.

Letters: T tokens, D model, F hidden, N query heads, K kv heads, H head dim, L layers, O outputs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels_pallas.kv_cache import KVCache
from kernels_pallas.projection import or_no_codes
from kernels_pallas.work_plan import AttentionBatch

__all__ = [
    "ATTENTION_HALF",
    "MLP_HALF",
    "AttentionWeights",
    "MLPWeights",
    "PackedWeights",
    "run_attention_half",
    "run_mlp_half",
]

ATTENTION_HALF = "headrace_attention_half"
MLP_HALF = "headrace_mlp_half"


class PackedWeights(NamedTuple):
    """Packed weights of a product, of all layers.

    Those of eight bits have scales; those in bfloat16 may have packed codes (`group_codes`).
    """

    weight: Array
    scale: Float[Array, "L O"] | None
    codes: Array | None = None


class AttentionWeights(NamedTuple):
    """What the first half of all layers has: the scale of its norm, and its matrices.

    `qkv` makes [N * H, K * H, K * H] numbers of a token, `out` takes N * H.
    """

    norm: Float[Array, "L D"]
    qkv: PackedWeights
    qkv_bias: Float[Array, "L O"] | None
    q_norm: Float[Array, "L H"] | None
    k_norm: Float[Array, "L H"] | None
    out: PackedWeights


class MLPWeights(NamedTuple):
    """What the second half of all layers has. `gate_up` makes the gate's F numbers, then up's."""

    norm: Float[Array, "L D"]
    gate_up: PackedWeights
    down: PackedWeights


def run_attention_half(
    x_TD: Float[Array, "T D"],
    weights: AttentionWeights,
    rope: tuple[Float[Array, "T 1 H/2"], Float[Array, "T 1 H/2"]],
    kv_cache: KVCache,
    batch: AttentionBatch,
    num_slots: Int[Array, ""],
    *,
    layer: Int[Array, ""],
    eps: float,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    adds: bool,
) -> tuple[Float[Array, "T D"], KVCache]:
    """Run norm, attention and its output product; write K and V into the cache, in place.

    `native.load` must have been called. A token has the same bits whatever it is computed with.

    Args:
        x_TD: the residual stream, in f32.
        weights: of all layers.
        rope: cosines and sines of each token.
        kv_cache: of the native kernel.
        batch: where the tokens belong.
        num_slots: how many of the T are computed, at least those of the batch. What the others
            hold is finite.
        layer: which one is run.
        eps: of the norms.
        scale: as of ragged_paged_attention.
        sliding_window: likewise.
        soft_cap: likewise.
        adds: return the sum with x, in its place where XLA allows it, instead of what attention
            gives.
    """
    cosines, sines = rope
    num_tokens, width = x_TD.shape
    half = cosines.shape[-1]
    operands = [
        x_TD,
        kv_cache.data,
        cosines.reshape(num_tokens, half),
        sines.reshape(num_tokens, half),
        num_slots,
        batch.slot_mapping,
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_tables,
        layer.astype(jnp.int32),
        weights.norm,
        *_operands(weights.qkv),
        _or_none(weights.qkv_bias),
        _or_none(weights.q_norm),
        _or_none(weights.k_norm),
        *_operands(weights.out),
    ]
    results = [
        jax.ShapeDtypeStruct((num_tokens, width), jnp.float32),
        jax.ShapeDtypeStruct(kv_cache.data.shape, kv_cache.data.dtype),
    ]
    aliases = {1: 1}
    if adds:
        aliases[0] = 0
    if kv_cache.scales is not None:
        aliases[len(operands)] = 2
        operands.append(kv_cache.scales)
        results.append(jax.ShapeDtypeStruct(kv_cache.scales.shape, kv_cache.scales.dtype))
    call = jax.ffi.ffi_call(ATTENTION_HALF, results, input_output_aliases=aliases)
    out_TD, data, *scales = call(
        *operands,
        dtype=kv_cache.dtype,
        num_layers=np.int64(weights.norm.shape[0]),
        head_dim=np.int64(2 * half),
        eps=np.float32(eps),
        scale=np.float32(scale),
        # 0 for none: an attribute has no other way to say so.
        sliding_window=np.int64(sliding_window or 0),
        soft_cap=np.float32(soft_cap or 0),
        adds=adds,
    )
    return out_TD, KVCache(data, scales[0] if scales else None, kv_cache.dtype, kv_cache.kernel)


def run_mlp_half(
    x_TD: Float[Array, "T D"],
    weights: MLPWeights,
    num_slots: Int[Array, ""],
    *,
    layer: Int[Array, ""],
    eps: float,
    is_gelu: bool,
    adds: bool,
) -> Float[Array, "T D"]:
    """Run norm, gate, up and down.

    Args:
        x_TD: as of run_attention_half.
        weights: of all layers.
        num_slots: as of run_attention_half.
        layer: likewise.
        eps: of the norm.
        is_gelu: the gate is a GELU, by tanh, instead of a SiLU.
        adds: as of run_attention_half.
    """
    call = jax.ffi.ffi_call(
        MLP_HALF,
        jax.ShapeDtypeStruct(x_TD.shape, jnp.float32),
        input_output_aliases={0: 0} if adds else {},
    )
    out_TD: Array = call(
        x_TD,
        num_slots,
        layer.astype(jnp.int32),
        weights.norm,
        *_operands(weights.gate_up),
        *_operands(weights.down),
        eps=np.float32(eps),
        is_gelu=is_gelu,
        adds=adds,
    )
    return out_TD


def _operands(weights: PackedWeights) -> tuple[Array, Array, Array]:
    return weights.weight, _or_none(weights.scale), or_no_codes(weights.codes)


def _or_none(parameter: Array | None) -> Array:
    """No layers where there is no such parameter: a call has an operand for it all the same."""
    return jnp.zeros((0, 0), jnp.float32) if parameter is None else parameter
