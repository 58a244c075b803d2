import jax.numpy as jnp
import pytest

from engine_builder import ENGINE_CONFIG, HF_CONFIG
from jaxengine.kv_cache import kv_block_bytes, new_device_state
from jaxengine.models.config import ModelConfig


@pytest.mark.parametrize(
    ("head_dim", "dtype", "expected"),
    [
        # K and V * 2 layers * 2 heads * 16 tokens * elements of a head * bytes
        (64, "float32", 2 * 2 * 2 * 16 * 64 * 4),
        (64, "bfloat16", 2 * 2 * 2 * 16 * 64 * 2),
        (128, "bfloat16", 2 * 2 * 2 * 16 * 128 * 2),
        (16, "bfloat16", 2 * 2 * 2 * 16 * 64 * 2),  # padded
    ],
)
def test_a_block_costs_what_the_device_allocates_for_it(head_dim, dtype, expected):
    model = ModelConfig.from_hf({**HF_CONFIG, "head_dim": head_dim})
    assert kv_block_bytes(model, block_size=16, dtype=dtype) == expected


def test_a_new_state_is_all_zero_and_of_the_configured_size():
    model = ModelConfig.from_hf(HF_CONFIG)
    state = new_device_state(model, ENGINE_CONFIG)
    block_bytes = kv_block_bytes(model, block_size=16, dtype="float32")
    assert state.kv_cache.nbytes == ENGINE_CONFIG.num_blocks * block_bytes
    assert state.kv_cache.dtype == jnp.float32
    assert not state.kv_cache.any()
    # One row for every running request, and a spare one for padding.
    assert state.last_token.shape == (ENGINE_CONFIG.max_num_seqs + 1,)
    assert not state.last_token.any()
