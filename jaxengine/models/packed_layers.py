"""All layers with packed weights, by the native library; for CPUs.

The same layers as `decoder_layer` has them, in one call; or each in two, where a norm or what other
devices have comes between a half and the residual stream. The parameters of all layers lie in one
array each, so that a program compiles in a tenth of the time.

Letters: T packed tokens, D model.
"""

import itertools
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxengine.models.config import ModelConfig
from jaxengine.models.decoder_layer import DecoderLayer, Rope
from jaxengine.models.layers import Linear, RMSNorm, row_mean, values
from jaxengine.models.sharding import add_up
from kernels_pallas.kv_cache import KVCache
from kernels_pallas.native_layer import (
    AttentionWeights,
    Halves,
    MLPWeights,
    PackedWeights,
    run_layers,
)
from kernels_pallas.work_plan import AttentionBatch

__all__ = ["can_pause", "run_packed_layers"]

type Carried = tuple[Float[Array, "T D"], KVCache]


def run_packed_layers(
    stack: DecoderLayer,
    config: ModelConfig,
    x_TD: Float[Array, "T D"],
    rope: Rope,
    kv_cache: KVCache,
    batch: AttentionBatch,
    *,
    num_slots: Int[Array, ""] | None,
    begins: Int[Array, ""] | None = None,
    serial: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "T D"], KVCache, Int[Array, ""]]:
    """Run all layers over the packed tokens, or those that are left of a step.

    Args:
        stack: a layer whose parameters are those of all, with an axis for layers in front.
        config: of the model.
        x_TD: the residual stream.
        rope: cosines and sines.
        kv_cache: of the native kernel.
        batch: where the tokens belong.
        num_slots: as of Decoder.
        begins: the first layer to run, if not that of the model; where `can_pause` allows it.
        serial: as of kernels_pallas.native_layer.run_layers; likewise.

    Returns:
        The residual stream behind the last layer that was run, the cache with this step's K and V,
        and the layer that comes next.
    """
    assert (begins is None and serial is None) or can_pause(config)
    attention = AttentionWeights(
        norm=stack.input_norm.scale[...],
        qkv=_packed(stack.attention.qkv_proj),
        qkv_bias=values(stack.attention.qkv_proj.bias),
        q_norm=stack.attention.q_norm.scale[...] if config.qk_norm else None,
        k_norm=stack.attention.k_norm.scale[...] if config.qk_norm else None,
        out=_packed(stack.attention.o_proj),
    )
    mlp = MLPWeights(
        norm=stack.post_attention_norm.scale[...],
        gate_up=_packed(stack.mlp.gate_up_proj),
        down=_packed(stack.mlp.down_proj),
    )
    if num_slots is None:
        num_slots = jnp.int32(len(x_TD))
    # What is added to the stream is added at once, unless others have parts of it too, or it goes
    # through a norm before.
    adds = config.num_shards == 1 and not config.is_gemma2
    eps = config.rms_norm_eps

    def add(
        x_TD: Array, half_TD: Array, norm: RMSNorm | None, layer: Int[Array, ""]
    ) -> Float[Array, "T D"]:
        half_TD = add_up(half_TD, config.num_shards)
        if norm is not None:
            mean = row_mean(half_TD * half_TD)
            half_TD = half_TD * lax.rsqrt(mean + eps) * norm.scale[...][layer]
        return x_TD + half_TD

    def run(
        x_TD: Array, kv_cache: KVCache, window: int | None, layers: Array, halves: Halves = "both"
    ) -> tuple[Array, KVCache, Array]:
        return run_layers(
            x_TD,
            attention,
            mlp,
            rope,
            kv_cache,
            batch,
            num_slots,
            layers=layers,
            serial=serial,
            halves=halves,
            eps=eps,
            scale=config.attention_scale,
            sliding_window=window,
            soft_cap=config.attention_soft_cap,
            is_gelu=config.is_gemma2,
            adds=adds,
        )

    def run_in_halves(window: int | None, layer: Int[Array, ""], carried: Carried) -> Carried:
        x_TD, kv_cache = carried
        layers = layer + jnp.arange(2)
        attended_TD, kv_cache, _ = run(x_TD, kv_cache, window, layers, "attention")
        x_TD = add(x_TD, attended_TD, stack.attended_norm, layer)
        mlp_TD, kv_cache, _ = run(x_TD, kv_cache, window, layers, "mlp")
        return add(x_TD, mlp_TD, stack.mlp_norm, layer), kv_cache

    first, reached = 0, jnp.int32(config.num_layers)
    for window, some in itertools.groupby(config.windows):
        end = first + len(list(some))
        if adds:
            layers = jnp.stack([jnp.int32(first) if begins is None else begins, jnp.int32(end)])
            x_TD, kv_cache, reached = run(x_TD, kv_cache, window, layers)
        else:
            body = partial(run_in_halves, window)
            x_TD, kv_cache = lax.fori_loop(first, end, body, (x_TD, kv_cache))
        first = end
    return x_TD, kv_cache, reached


def can_pause(config: ModelConfig) -> bool:
    """Whether a step can end between two layers, and go on later: all layers are one call."""
    return config.num_shards == 1 and not config.is_gemma2 and len(set(config.windows)) == 1


def _packed(linear: Linear) -> PackedWeights:
    return PackedWeights(linear.weight[...], values(linear.weight_scale), values(linear.codes))
