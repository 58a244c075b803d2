"""The device state of the engine: the KV cache and the last token of every row."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxengine.config import Dtype, EngineConfig
from jaxengine.config import KVCacheDtype as WantedKVCacheDtype
from jaxengine.models.config import ModelConfig
from kernels_pallas.kernel_names import AttentionKernel
from kernels_pallas.kv_cache import KVCache, KVCacheDtype
from kernels_pallas.ragged_paged_attention import new_kv_cache

__all__ = ["DeviceState", "kv_block_bytes", "new_device_state", "resolve_kv_cache_dtype"]


class DeviceState(NamedTuple):
    """What lives on the device between steps. Donated to every step, never copied.

    Attributes:
        kv_cache: K and V of all layers and blocks, in the layout of the attention kernel.
        last_token: the last sampled token of each row, plus one spare row for padding.
    """

    kv_cache: KVCache
    last_token: Int[Array, "R+1"]


def resolve_kv_cache_dtype(wanted: WantedKVCacheDtype, dtype: Dtype) -> KVCacheDtype:
    """Return the dtype of the KV cache; "auto" is that of the weights."""
    return dtype if wanted == "auto" else wanted


def kv_block_bytes(
    model: ModelConfig,
    *,
    block_size: int,
    dtype: KVCacheDtype,
    kernel: AttentionKernel = "reference",
) -> int:
    """Return the bytes that one block takes over all layers, scales included."""
    block = jax.eval_shape(
        lambda: _new_kv_cache(
            model, num_blocks=1, block_size=block_size, dtype=dtype, kernel=kernel
        )
    )
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(block))


def new_device_state(model: ModelConfig, config: EngineConfig) -> DeviceState:
    """Allocate an empty state. Zeros, because masked garbage must stay finite."""
    return DeviceState(
        kv_cache=_new_kv_cache(
            model,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            dtype=resolve_kv_cache_dtype(config.kv_cache_dtype, config.dtype),
            kernel=config.attention_kernel,
        ),
        last_token=jnp.zeros(config.max_num_seqs + 1, jnp.int32),
    )


def _new_kv_cache(
    model: ModelConfig,
    *,
    num_blocks: int,
    block_size: int,
    dtype: KVCacheDtype,
    kernel: AttentionKernel,
) -> KVCache:
    return new_kv_cache(
        num_layers=model.num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
        kernel=kernel,
    )
