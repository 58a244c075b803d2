"""What holds for the XLA implementation: its layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_scene import KV_CACHE_DTYPES, quantized
from kernels_pallas.kv_cache import KVCache
from kernels_pallas.reference import new_kv_cache, write_kv


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 16])
def test_keys_and_values_are_stored_bit_by_bit_and_nothing_else_changes(head_dim, dtype):
    """Layout by hand: row `first_block + block`; K then V; head; offset; padded head."""
    rng = np.random.default_rng(0)
    shape = two_layers(head_dim, dtype).data.shape
    assert shape == (10, 2, 3, 8, 64)
    before = rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))
    k, v, written = write_four_tokens(
        KVCache(jnp.asarray(before), None, dtype, "reference"), head_dim
    )
    after = np.asarray(written.data)
    expected = before.copy()
    for token, (block, offset) in enumerate(PLACES):
        expected[5 + block, 0, :, offset, :head_dim] = k[token].astype(before.dtype)
        expected[5 + block, 1, :, offset, :head_dim] = v[token].astype(before.dtype)
        expected[5 + block, :, :, offset, head_dim:] = 0
    expected[5] = after[5]  # the layer's reserved block takes the padding
    np.testing.assert_array_equal(after, expected)


def test_integers_are_stored_beside_their_scales_and_nothing_else_changes():
    before = two_layers(16, "int8")
    data, scales = np.full(before.data.shape, 99, np.int8), np.full(before.scales.shape, 99.0)
    cache = KVCache(jnp.asarray(data), jnp.asarray(scales, jnp.bfloat16), "int8", "reference")
    k, v, written = write_four_tokens(cache, 16)
    for token, (block, offset) in enumerate(PLACES):
        for which, x in enumerate((k[token], v[token])):
            place = (5 + block, which, slice(None), offset)
            steps, scales[place] = quantized(x)
            data[place] = np.pad(steps, ((0, 0), (0, 48)))
    for after, expected in [(written.data, data), (written.scales, scales)]:
        after = np.asarray(after).astype(np.float64)
        np.testing.assert_array_equal(after[:5], expected[:5])
        np.testing.assert_array_equal(after[6:], expected[6:])


@pytest.mark.parametrize(
    ("dtype", "bits"), [("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")]
)
def test_small_floats_are_stored_as_their_bytes(dtype, bits):
    k, v, written = write_four_tokens(two_layers(64, dtype), 64)
    after = np.array(written.data)
    for token, (block, offset) in enumerate(PLACES):
        both = np.stack([k[token], v[token]]).astype(bits).view(np.uint8)
        np.testing.assert_array_equal(after[5 + block, :, :, offset], both)
        after[5 + block, :, :, offset] = 0
    assert not after[:5].any()
    assert not after[6:].any()


# Block and offset of each token that write_four_tokens writes.
PLACES = [(3, 7), (1, 0), (1, 1), (3, 4)]


def two_layers(head_dim, dtype):
    return new_kv_cache(
        num_layers=2, num_blocks=5, block_size=8, num_kv_heads=3, head_dim=head_dim, dtype=dtype
    )


def write_four_tokens(cache, head_dim):
    """Write into the second layer, with two tokens of padding; return K, V and the cache."""
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((6, 3, head_dim), np.float32) for _ in "kv")
    slots = np.array([block * 8 + offset for block, offset in PLACES] + [0, 0], np.int32)
    return k, v, write_kv(cache, k, v, slots, first_block=jnp.int32(5))


@pytest.mark.parametrize("block_size", [0, 3, 48, 256])
def test_blocks_that_do_not_tile_the_context_are_refused(block_size):
    with pytest.raises(ValueError, match=f"block_size {block_size} must divide 128"):
        new_kv_cache(
            num_layers=1,
            num_blocks=2,
            block_size=block_size,
            num_kv_heads=1,
            head_dim=64,
            dtype="float32",
        )


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_a_program_writes_into_a_donated_cache_in_place(dtype):
    cache = jax.eval_shape(
        lambda: new_kv_cache(
            num_layers=1, num_blocks=4096, block_size=8, num_kv_heads=3, head_dim=64, dtype=dtype
        )
    )
    k = jax.ShapeDtypeStruct((8, 3, 64), jnp.float32)
    slots = jax.ShapeDtypeStruct((8,), jnp.int32)
    first = jax.ShapeDtypeStruct((), jnp.int32)
    program = jax.jit(write_kv, donate_argnums=0).lower(cache, k, k, slots, first_block=first)
    memory = program.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= cache.data.size * cache.data.dtype.itemsize
    assert memory.temp_size_in_bytes < 100_000  # of 12 MB or more
