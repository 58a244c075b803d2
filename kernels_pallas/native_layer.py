"""Layers of a decoder on CPUs, as calls of the native library.

Between the products of a layer lie norms, the rotation of queries and keys, the write into the KV
cache, attention, a gate and two sums. XLA makes a pass over memory of each, many of them in one
thread, and its threads meet at every product. `native_source/layer.cc` hands rows from one to the
next in phases of one call, and goes on to the next layer (docs/decisions/0025).

Weights of all layers lie in one array each, packed as `projection` has it.

Letters: T tokens, D model, F hidden, N query heads, K kv heads, H head dim, L layers, O outputs.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels_pallas.kv_cache import KVCache
from kernels_pallas.projection import or_no_codes
from kernels_pallas.work_plan import AttentionBatch

__all__ = [
    "LAYERS",
    "AttentionWeights",
    "Halves",
    "MLPWeights",
    "PackedWeights",
    "run_layers",
]

LAYERS = "headrace_layers"

Halves = Literal["attention", "mlp", "both"]
HALVES: Mapping[Halves, int] = {"attention": 1, "mlp": 2, "both": 3}


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


def run_layers(
    x_TD: Float[Array, "T D"],
    attention: AttentionWeights,
    mlp: MLPWeights,
    rope: tuple[Float[Array, "T 1 H/2"], Float[Array, "T 1 H/2"]],
    kv_cache: KVCache,
    batch: AttentionBatch,
    num_slots: Int[Array, ""],
    *,
    layers: Int[Array, "2"],
    serial: Int[Array, ""] | None = None,
    halves: Halves = "both",
    eps: float,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    is_gelu: bool,
    adds: bool,
) -> tuple[Float[Array, "T D"], KVCache, Int[Array, ""]]:
    """Run layers one after the other; write K and V into the cache, in place.

    The first half of a layer is norm, attention and its output product, the second norm, gate, up
    and down. `native.load` must have been called. A token has the same bits whatever it is computed
    with.

    Args:
        x_TD: the residual stream, in f32.
        attention: of all layers.
        mlp: likewise.
        rope: cosines and sines of each token.
        kv_cache: of the native kernel.
        batch: where the tokens belong.
        num_slots: how many of the T are computed, at least those of the batch. What the others
            hold is finite.
        layers: the first that is run, and the one behind the last; equal for none.
        serial: number of the step, with which `NativeLibrary.pause` has the call end behind the
            layer at hand; it cannot be paused without, or with 0.
        halves: what is run of them.
        eps: of the norms.
        scale: as of ragged_paged_attention.
        sliding_window: likewise.
        soft_cap: likewise.
        is_gelu: the gate is a GELU, by tanh, instead of a SiLU.
        adds: return the sum with x, in its place where XLA allows it, instead of what a half gives;
            always so for more than one half.

    Returns:
        What was computed, the cache, and the layer behind the last that was run.
    """
    if not adds and halves == "both":
        raise ValueError("layers are run in halves where their results are not added")
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
        layers.astype(jnp.int32),
        jnp.zeros((), jnp.int32) if serial is None else serial,
        attention.norm,
        *_operands(attention.qkv),
        _or_none(attention.qkv_bias),
        _or_none(attention.q_norm),
        _or_none(attention.k_norm),
        *_operands(attention.out),
        mlp.norm,
        *_operands(mlp.gate_up),
        *_operands(mlp.down),
    ]
    results = [
        jax.ShapeDtypeStruct((num_tokens, width), jnp.float32),
        jax.ShapeDtypeStruct(kv_cache.data.shape, kv_cache.data.dtype),
        jax.ShapeDtypeStruct((), jnp.int32),
    ]
    aliases = {1: 1}
    if adds:
        aliases[0] = 0
    if kv_cache.scales is not None:
        aliases[len(operands)] = 3
        operands.append(kv_cache.scales)
        results.append(jax.ShapeDtypeStruct(kv_cache.scales.shape, kv_cache.scales.dtype))
    call = jax.ffi.ffi_call(LAYERS, results, input_output_aliases=aliases)
    out_TD, data, reached, *scales = call(
        *operands,
        dtype=kv_cache.dtype,
        halves=np.int64(HALVES[halves]),
        head_dim=np.int64(2 * half),
        eps=np.float32(eps),
        scale=np.float32(scale),
        # 0 for none: an attribute has no other way to say so.
        sliding_window=np.int64(sliding_window or 0),
        soft_cap=np.float32(soft_cap or 0),
        is_gelu=is_gelu,
        adds=adds,
    )
    kv_cache = KVCache(data, scales[0] if scales else None, kv_cache.dtype, kv_cache.kernel)
    return out_TD, kv_cache, reached


def _operands(weights: PackedWeights) -> tuple[Array, Array, Array]:
    return weights.weight, _or_none(weights.scale), or_no_codes(weights.codes)


def _or_none(parameter: Array | None) -> Array:
    """No layers where there is no such parameter: a call has an operand for it all the same."""
    return jnp.zeros((0, 0), jnp.float32) if parameter is None else parameter
