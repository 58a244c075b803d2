"""How numbers are stored, against ml_dtypes and by hand."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from attention_scene import KV_CACHE_DTYPES, stored
from kernels_pallas.kv_cache import (
    KVCache,
    decode_kv,
    encode_kv,
    product_dtype,
    scale_dtype,
    storage_dtype,
)

FP8 = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}


def round_trip(x, dtype):
    """What is read back after a write."""

    @jax.jit
    def write_and_read(x):
        data, scales = encode_kv(x, dtype)
        assert data.dtype == storage_dtype(dtype)
        values = decode_kv(data, dtype)
        assert values.dtype == product_dtype(dtype)
        values = values.astype(jnp.float32)
        if scales is None:
            assert scale_dtype(dtype) is None
            return values
        assert scales.dtype == scale_dtype(dtype)
        return values * scales.astype(jnp.float32)[..., None]

    return np.asarray(write_and_read(np.asarray(x, np.float32)))


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_numbers_of_all_sizes_are_rounded_to_the_nearest(dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4096, 8), np.float32) * np.exp2(rng.integers(-12, 6, (4096, 1)))
    np.testing.assert_array_equal(round_trip(x, dtype), stored(x.astype(np.float32), dtype))


@pytest.mark.parametrize("dtype", FP8)
def test_every_finite_byte_is_read_exactly_and_others_as_the_largest_number(dtype):
    read = jax.jit(decode_kv, static_argnames="dtype")(np.arange(256, dtype=np.uint8), dtype)
    exact = np.arange(256, dtype=np.uint8).view(FP8[dtype]).astype(np.float32)
    largest = float(ml_dtypes.finfo(FP8[dtype]).max)
    expected = np.where(
        np.isfinite(exact), exact, np.where(np.arange(256) < 128, largest, -largest)
    )
    np.testing.assert_array_equal(np.asarray(read).astype(np.float32), expected)


@pytest.mark.parametrize(
    ("dtype", "largest"), [("fp8_e4m3", 448), ("fp8_e5m2", 57344), ("float16", 65504)]
)
def test_what_is_out_of_range_becomes_the_largest_number(dtype, largest):
    x = [[largest * 1.1, -largest * 1.1, 3e38, -np.inf, np.inf, largest, -largest, 0.0]]
    expected = [[largest, -largest, largest, -largest, largest, largest, -largest, 0]]
    np.testing.assert_array_equal(round_trip(x, dtype), expected)


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [("float32", np.finfo(np.float32).max), ("bfloat16", ml_dtypes.finfo(ml_dtypes.bfloat16).max)],
)
def test_what_has_the_range_of_float32_stores_no_infinity(dtype, largest):
    largest = float(largest)
    found = round_trip([[np.inf, -np.inf, np.finfo(np.float32).max, 1.5]], dtype)
    np.testing.assert_array_equal(found, np.float32([[largest, -largest, largest, 1.5]]))


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_what_is_not_a_number_is_stored_as_zero(dtype):
    found = round_trip([[np.nan, -np.nan, 1.0, -1.0], [np.nan] * 4], dtype)
    np.testing.assert_array_equal(found[0], stored(np.float32([0, 0, 1, -1]), dtype))
    np.testing.assert_array_equal(found[1], np.zeros(4))


def test_an_infinite_key_has_a_finite_scale():
    assert np.isfinite(round_trip([[np.inf, 1.0], [-np.inf, np.nan]], "int8")).all()


def test_integers_by_hand():
    """127 steps of 0.5 reach the largest; ties go to the even step."""
    data, scales = encode_kv(np.array([[63.5, -63.5, 0.75, 0.25, 0.3, 0.0]], np.float32), "int8")
    assert scales.tolist() == [0.5]
    assert data.tolist() == [[127, -127, 2, 0, 1, 0]]


def test_the_largest_integer_stays_in_range_when_its_scale_is_rounded_down():
    """1.003 * 127: bf16 has 1 and 1.0078125, so the scale is 1 and the steps are 127.38."""
    data, scales = encode_kv(np.array([[127.381, -127.381, 1.0]], np.float32), "int8")
    assert scales.tolist() == [1.0]
    assert data.tolist() == [[127, -127, 1]]


def test_a_key_of_zeros_is_stored_as_zeros():
    data, scales = encode_kv(np.zeros((2, 4), np.float32), "int8")
    assert not data.any()
    assert not scales.any()


def test_each_key_has_its_own_scale():
    x = np.array([[1e-6, 5e-7], [1e6, -1e6]], np.float32)
    np.testing.assert_allclose(round_trip(x, "int8"), x, rtol=1e-2)


def test_a_cache_without_scales_is_one_array():
    cache = KVCache(jnp.zeros(3), None, "float32", "reference")
    leaves, tree = jax.tree.flatten(cache)
    assert len(leaves) == 1
    assert tree.unflatten(leaves).dtype == "float32"


def test_a_dtype_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match=r"no dtype 'fp8', only bfloat16, .*fp8_e4m3"):
        storage_dtype("fp8")
