"""A layer of the decoder, in JAX: attention and MLP, each behind a norm and added to the stream.

Between products everything is f32, the residual stream included; products round their left
operand to the dtype of the weights. One rounding place per product keeps bf16 close to f32, and
leaves the compiler no choice that could differ between buckets.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from jaxengine.models.config import ModelConfig
from jaxengine.models.layers import Linear, RMSNorm, apply_rope
from jaxengine.models.sharding import add_up
from kernels_pallas.group_codes import CodeBits
from kernels_pallas.kv_cache import KVCache
from kernels_pallas.ragged_paged_attention import ragged_paged_attention, write_kv
from kernels_pallas.work_plan import AttentionBatch

__all__ = ["DecoderLayer", "Rope"]

Rope = tuple[Array, Array]


class Attention(nnx.Module):
    """Grouped-query attention. q, k and v are one product: few large beat many small."""

    def __init__(
        self, config: ModelConfig, *, dtype: DTypeLike, packed: bool, code_bits: CodeBits | None
    ) -> None:
        self.config = config
        linear = partial(Linear, dtype=dtype, packed=packed, code_bits=code_bits)
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.qkv_proj = linear(config.hidden_size, q_size + 2 * kv_size, bias=config.qkv_bias)
        self.o_proj = linear(q_size, config.hidden_size, bias=False)
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
        qkv = self.qkv_proj(x_TD, norm=norm)
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
        out_TD = self.o_proj(out_TNH.reshape(num_tokens, q_size))
        return add_up(out_TD, config.num_shards), kv_cache


class MLP(nnx.Module):
    """SwiGLU, or with GELU (by tanh) for Gemma 2; gate and up are one product."""

    def __init__(
        self, config: ModelConfig, *, dtype: DTypeLike, packed: bool, code_bits: CodeBits | None
    ) -> None:
        linear = partial(Linear, dtype=dtype, packed=packed, code_bits=code_bits, bias=False)
        model, hidden = config.hidden_size, config.intermediate_size
        self.num_shards = config.num_shards
        self.is_gelu = config.is_gemma2
        self.gate_up_proj = linear(model, 2 * hidden)
        self.down_proj = linear(hidden, model)

    def __call__(self, x_TD: Float[Array, "T D"], *, norm: RMSNorm) -> Float[Array, "T D"]:
        gate_TF, up_TF = jnp.split(self.gate_up_proj(x_TD, norm=norm), 2, axis=-1)
        gate = partial(jax.nn.gelu, approximate=True) if self.is_gelu else jax.nn.silu
        return add_up(self.down_proj(gate(gate_TF) * up_TF), self.num_shards)


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike,
        packed: bool,
        code_bits: CodeBits | None = None,
    ) -> None:
        self.input_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = Attention(config, dtype=dtype, packed=packed, code_bits=code_bits)
        self.post_attention_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config, dtype=dtype, packed=packed, code_bits=code_bits)
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
        mlp_TD = self.mlp(x_TD, norm=self.post_attention_norm)
        if self.mlp_norm is not None:
            mlp_TD = self.mlp_norm(mlp_TD)
        return x_TD + mlp_TD, kv_cache
