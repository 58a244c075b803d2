from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from engine_builder import ENGINE_CONFIG, HF_CONFIG
from jaxengine.kv_cache import kv_block_bytes, new_device_state, resolve_kv_cache_dtype
from jaxengine.models.config import ModelConfig


@pytest.mark.parametrize(
    ("head_dim", "dtype", "expected"),
    [
        # K and V * 2 layers * 2 heads * 16 tokens * elements of a head * bytes
        (64, "float32", 2 * 2 * 2 * 16 * 64 * 4),
        (64, "bfloat16", 2 * 2 * 2 * 16 * 64 * 2),
        (128, "bfloat16", 2 * 2 * 2 * 16 * 128 * 2),
        (16, "bfloat16", 2 * 2 * 2 * 16 * 64 * 2),  # padded
        (64, "float16", 2 * 2 * 2 * 16 * 64 * 2),
        (64, "fp8_e4m3", 2 * 2 * 2 * 16 * 64),
        (64, "fp8_e5m2", 2 * 2 * 2 * 16 * 64),
        (64, "int8", 2 * 2 * 2 * 16 * (64 + 2)),  # and a scale of two bytes
    ],
)
def test_a_block_costs_what_the_device_allocates_for_it(head_dim, dtype, expected):
    model = ModelConfig.from_hf({**HF_CONFIG, "head_dim": head_dim})
    assert kv_block_bytes(model, block_size=16, dtype=dtype) == expected


@pytest.mark.parametrize(
    ("kv_cache_dtype", "arrays"),
    [
        ("auto", ["float32"]),
        ("float32", ["float32"]),
        ("bfloat16", ["bfloat16"]),
        ("float16", ["float16"]),
        ("fp8_e4m3", ["uint8"]),
        ("fp8_e5m2", ["uint8"]),
        ("int8", ["int8", "bfloat16"]),
    ],
)
def test_a_new_state_is_all_zero_and_of_the_configured_size(kv_cache_dtype, arrays):
    model = ModelConfig.from_hf(HF_CONFIG)
    config = replace(ENGINE_CONFIG, kv_cache_dtype=kv_cache_dtype)
    dtype = resolve_kv_cache_dtype(config.kv_cache_dtype, config.dtype)
    state = new_device_state(model, config)
    leaves = jax.tree.leaves(state.kv_cache)
    block_bytes = kv_block_bytes(model, block_size=16, dtype=dtype)
    assert sum(array.nbytes for array in leaves) == config.num_blocks * block_bytes
    assert [array.dtype.name for array in leaves] == arrays
    assert not any(array.any() for array in leaves)
    # One row for every running request, and a spare one for padding.
    assert state.last_token.shape == (config.max_num_seqs + 1,)
    assert state.last_token.dtype == jnp.int32
    assert not state.last_token.any()


def test_without_a_wish_the_cache_has_the_dtype_of_the_weights():
    assert resolve_kv_cache_dtype("auto", "float32") == "float32"
    assert resolve_kv_cache_dtype("auto", "bfloat16") == "bfloat16"
    assert resolve_kv_cache_dtype("float32", "bfloat16") == "float32"
