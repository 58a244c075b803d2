"""The device state of the engine: the KV cache and the last token of every row."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxengine.config import EngineConfig
from jaxengine.models.config import ModelConfig
from kernels_pallas.ragged_paged_attention import kv_cache_shape

__all__ = ["DeviceState", "kv_block_bytes", "new_device_state"]


class DeviceState(NamedTuple):
    """What lives on the device between steps. Donated to every step, never copied.

    Attributes:
        kv_cache: K and V of all layers and blocks, in the layout of the attention kernel.
        last_token: the last sampled token of each row, plus one spare row for padding.
    """

    kv_cache: Array
    last_token: Int[Array, "R+1"]


def kv_block_bytes(model: ModelConfig, *, block_size: int, dtype: str) -> int:
    """Return the bytes that one block takes over all layers."""
    shape = kv_cache_shape(
        num_layers=model.num_layers,
        num_blocks=1,
        block_size=block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
    )
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def new_device_state(model: ModelConfig, config: EngineConfig) -> DeviceState:
    """Allocate an empty state. Zeros, because masked garbage must stay finite."""
    shape = kv_cache_shape(
        num_layers=model.num_layers,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
    )
    return DeviceState(
        kv_cache=jnp.zeros(shape, config.dtype),
        last_token=jnp.zeros(config.max_num_seqs + 1, jnp.int32),
    )
