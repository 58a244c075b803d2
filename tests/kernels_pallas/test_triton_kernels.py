"""What the products of the Triton kernels hold; test_triton.py runs the kernels."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.kv_cache import decode_kv
from kernels_pallas.triton_kernels import product_dtype, widen


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_eight_bit_floats_are_widened_exactly(dtype):
    """All bytes that are ever written: without the patterns of infinity and NaN."""
    every = np.arange(256, dtype=np.uint8)
    largest = 0x7E if dtype == "fp8_e4m3" else 0x7B
    written = jnp.asarray(every[(every & 0x7F) <= largest])
    numbers, factor = widen(written, dtype)
    assert numbers.dtype == jnp.float16
    np.testing.assert_array_equal(
        numbers.astype(jnp.float32) * factor, decode_kv(written, dtype).astype(jnp.float32)
    )


def test_integers_and_bfloat16_are_multiplied_in_bfloat16():
    assert product_dtype("int8") == product_dtype("bfloat16") == jnp.bfloat16
    assert product_dtype("float32") == jnp.float32
    assert product_dtype("float16") == product_dtype("fp8_e4m3") == jnp.float16
