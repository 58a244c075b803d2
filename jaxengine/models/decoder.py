"""The decoder of the Llama line: packed tokens and a paged KV cache in, hidden states out.

One class with options covers Llama, SmolLM2, Mistral, Qwen2, Qwen3 and Gemma 2 (models/config.py).
There is one definition of a layer, and two ways to run all of them. Packed weights of all layers
lie in one array each, which the products index, so that the program is one layer in a loop and
compiles in a tenth of the time. Others are unrolled, because a loop would copy every layer's slice;
they are traced once all the same, since every layer calls the same jitted function.

Between products everything is f32, the residual stream included; products round their left
operand to the dtype of the weights. One rounding place per product keeps bf16 close to f32, and
leaves the compiler no choice that could differ between buckets.
"""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int

from jaxengine.config import Quantization
from jaxengine.models.config import ModelConfig
from jaxengine.models.layers import (
    Linear,
    RMSNorm,
    apply_rope,
    is_packed,
    project,
    rope_frequencies,
    rope_tables,
)
from jaxengine.models.sharding import add_up, join_vocabulary, look_up
from kernels_pallas.kv_cache import KVCache
from kernels_pallas.ragged_paged_attention import (
    ragged_paged_attention,
    write_kv,
)
from kernels_pallas.work_plan import AttentionBatch

__all__ = ["Decoder"]

Rope = tuple[Array, Array]


class Attention(nnx.Module):
    """Grouped-query attention. q, k and v are one product: few large beat many small."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, packed: bool) -> None:
        self.config = config
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.qkv_proj = Linear(
            config.hidden_size,
            q_size + 2 * kv_size,
            bias=config.qkv_bias,
            dtype=dtype,
            packed=packed,
        )
        self.o_proj = Linear(q_size, config.hidden_size, bias=False, dtype=dtype, packed=packed)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def __call__(
        self,
        x_TD: Float[Array, "T D"],
        rope: Rope,
        kv_cache: KVCache,
        batch: AttentionBatch,
        *,
        norm: RMSNorm,
        layer: Int[Array, ""],
        window: int | None,
        decode_only: bool,
    ) -> tuple[Float[Array, "T D"], KVCache]:
        config = self.config
        first_block = layer * (kv_cache.data.shape[0] // config.num_layers)
        num_tokens = x_TD.shape[0]
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        qkv = self.qkv_proj(x_TD, layer, norm=norm)
        q, k, v = jnp.split(qkv, [q_size, q_size + kv_size], axis=-1)
        q_TNH = q.reshape(num_tokens, config.num_heads, config.head_dim)
        k_TKH = k.reshape(num_tokens, config.num_kv_heads, config.head_dim)
        v_TKH = v.reshape(num_tokens, config.num_kv_heads, config.head_dim)
        if config.qk_norm:
            q_TNH, k_TKH = self.q_norm(q_TNH), self.k_norm(k_TKH)
        q_TNH, k_TKH = apply_rope(q_TNH, rope), apply_rope(k_TKH, rope)
        kv_cache = write_kv(kv_cache, k_TKH, v_TKH, batch.slot_mapping, first_block=first_block)
        out_TNH = ragged_paged_attention(
            q_TNH,
            kv_cache,
            batch,
            first_block=first_block,
            num_kv_heads=config.num_kv_heads,
            scale=config.attention_scale,
            decode_only=decode_only,
            sliding_window=window,
            soft_cap=config.attention_soft_cap,
        )
        out_TD = self.o_proj(out_TNH.reshape(num_tokens, q_size), layer)
        return add_up(out_TD, config.num_shards), kv_cache


class MLP(nnx.Module):
    """SwiGLU, or with GELU (by tanh) for Gemma 2; gate and up are one product."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, packed: bool) -> None:
        model, hidden = config.hidden_size, config.intermediate_size
        self.num_shards = config.num_shards
        self.is_gelu = config.is_gemma2
        self.gate_up_proj = Linear(model, 2 * hidden, bias=False, dtype=dtype, packed=packed)
        self.down_proj = Linear(hidden, model, bias=False, dtype=dtype, packed=packed)

    def __call__(
        self, x_TD: Float[Array, "T D"], *, norm: RMSNorm, layer: Int[Array, ""]
    ) -> Float[Array, "T D"]:
        gate_up = self.gate_up_proj(x_TD, layer, norm=norm)
        if self.is_gelu:
            gate_TF, up_TF = jnp.split(gate_up, 2, axis=-1)
            down_TD = self.down_proj(jax.nn.gelu(gate_TF) * up_TF, layer)
        else:
            down_TD = self.down_proj.of_gated(gate_up, layer)
        return add_up(down_TD, self.num_shards)


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, packed: bool) -> None:
        self.input_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = Attention(config, dtype=dtype, packed=packed)
        self.post_attention_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config, dtype=dtype, packed=packed)
        self.attended_norm, self.mlp_norm = (
            RMSNorm(config.hidden_size, eps=config.rms_norm_eps) if config.is_gemma2 else None
            for _ in range(2)
        )

    def __call__(
        self,
        x_TD: Float[Array, "T D"],
        rope: Rope,
        kv_cache: KVCache,
        batch: AttentionBatch,
        *,
        layer: Int[Array, ""],
        window: int | None,
        decode_only: bool,
    ) -> tuple[Float[Array, "T D"], KVCache]:
        """Run the layer.

        Args:
            x_TD: the residual stream.
            rope: cosines and sines.
            kv_cache: as of ragged_paged_attention.
            batch: likewise.
            layer: its number, which tells its part of the cache.
            window: its sliding window.
            decode_only: as of ragged_paged_attention.
        """
        attended_TD, kv_cache = self.attention(
            x_TD,
            rope,
            kv_cache,
            batch,
            norm=self.input_norm,
            layer=layer,
            window=window,
            decode_only=decode_only,
        )
        if self.attended_norm is not None:
            attended_TD = self.attended_norm(attended_TD)
        x_TD = x_TD + attended_TD
        mlp_TD = self.mlp(x_TD, norm=self.post_attention_norm, layer=layer)
        if self.mlp_norm is not None:
            mlp_TD = self.mlp_norm(mlp_TD)
        return x_TD + mlp_TD, kv_cache


class Decoder(nnx.Module):
    """Embedding, layers, final norm, and the output projection.

    Weights are zeros until models.loader fills them (under `nnx.eval_shape`, nothing at all).

    Args:
        config: sizes and options.
        dtype: of the matrices.
        packed: whether they are for kernels_pallas.projection, where their sizes allow it. Tied
            embeddings then lie in memory twice: to be looked up, and to be multiplied with.
        quantization: of all matrices but the embedding, which is looked up as it is; a tied one
            then lies in memory twice as well.

    Attributes:
        stack: the parameters of all layers in the arrays of one, if these are packed. Packed
            weights have an axis for layers, others get one.
        layers: all layers otherwise.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike,
        packed: bool = False,
        quantization: Quantization | None = None,
    ) -> None:
        self.config = config
        self.embedding = nnx.Param(jnp.zeros((config.vocab_rows, config.hidden_size), dtype))
        if quantization is not None:
            dtype = jnp.dtype(quantization)
        layer = DecoderLayer(config, dtype=dtype, packed=packed)
        matrices = [w for w in jax.tree.leaves(nnx.state(layer)) if w.ndim > 1]
        is_stacked = all(is_packed(w.shape) for w in matrices)
        self.stack = _stacked(layer, config.num_layers) if is_stacked else None
        self.layers = nnx.List(
            [
                DecoderLayer(config, dtype=dtype, packed=False)
                for _ in range(0 if is_stacked else config.num_layers)
            ]
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        head = Linear(config.hidden_size, config.vocab_rows, bias=False, dtype=dtype, packed=packed)
        differs = quantization is not None or is_packed(head.weight.shape)
        self.lm_head = head if differs or not config.tie_embeddings else None

    def __call__(
        self,
        token_ids_T: Int[Array, "T"],
        positions_T: Int[Array, "T"],
        kv_cache: KVCache,
        batch: AttentionBatch,
        *,
        decode_only: bool,
    ) -> tuple[Float[Array, "T D"], KVCache]:
        """Run all layers over the packed tokens.

        Returns:
            Hidden states before the final norm, and the cache with this step's K and V.
        """
        rope = rope_tables(positions_T, rope_frequencies(self.config))
        x_TD = look_up(self.embedding[...], token_ids_T, self.config)
        if self.config.is_gemma2:
            # Rounded as the weights are, which Gemma was trained with.
            scale = jnp.asarray(self.config.hidden_size**0.5, self.embedding[...].dtype)
            x_TD = x_TD * scale.astype(jnp.float32)
        windows = self.config.windows
        if self.stack is None:
            for index, layer in enumerate(self.layers):
                graph, weights = nnx.split(layer)
                number = jnp.int32(index)
                x_TD, kv_cache = _run_layer(
                    graph, weights, x_TD, rope, kv_cache, batch, number, windows[index], decode_only
                )
            return x_TD, kv_cache
        graph, stacked = nnx.split(self.stack)

        def run(
            window: int | None,
            index: Int[Array, ""],
            carried: tuple[Float[Array, "T D"], KVCache],
        ) -> tuple[Float[Array, "T D"], KVCache]:
            x_TD, kv_cache = carried
            # The products find their layer themselves; of the rest a layer has some kilobytes.
            weights = jax.tree.map(lambda w: w if is_packed(w.shape) else w[index], stacked)
            ran: tuple[Array, KVCache] = _run_layer(
                graph, weights, x_TD, rope, kv_cache, batch, index, window, decode_only
            )
            return ran

        # Each run of layers of one window is a loop.
        first = 0
        for window, layers in itertools.groupby(windows):
            end = first + len(list(layers))
            x_TD, kv_cache = lax.fori_loop(first, end, partial(run, window), (x_TD, kv_cache))
            first = end
        return x_TD, kv_cache

    def logits(self, x_SD: Float[Array, "S D"]) -> Float[Array, "S V"]:
        """Return f32 logits of the given hidden states; call it only where a token is sampled."""
        if self.lm_head is None:
            logits_SV = project(self.norm(x_SD), self.embedding[...])
        else:
            logits_SV = self.lm_head(x_SD, norm=self.norm)
        cap = self.config.logit_soft_cap
        if cap is not None:
            logits_SV = cap * jnp.tanh(logits_SV / cap)
        return join_vocabulary(logits_SV, self.config)


@partial(jax.jit, static_argnames=("graph", "window", "decode_only"))
def _run_layer(
    graph: nnx.GraphDef[DecoderLayer],
    weights: nnx.State[Any, Any],
    x_TD: Array,
    rope: Rope,
    kv_cache: KVCache,
    batch: AttentionBatch,
    index: Array,
    window: int | None,
    decode_only: bool,
) -> tuple[Array, KVCache]:
    """Run one layer. Layers have equal graphs and shapes: those of one window share the trace."""
    layer = nnx.merge(graph, weights)
    return layer(x_TD, rope, kv_cache, batch, layer=index, window=window, decode_only=decode_only)


def _stacked(layer: DecoderLayer, num_layers: int) -> DecoderLayer:
    """Return a layer with room for the parameters of all."""

    def stack(w: Array) -> Array:
        return jnp.zeros((num_layers, *(w.shape[1:] if is_packed(w.shape) else w.shape)), w.dtype)

    nnx.update(layer, jax.tree.map(stack, nnx.state(layer)))
    return layer
