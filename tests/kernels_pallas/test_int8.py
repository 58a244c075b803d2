"""Products of eight bits: against integers of NumPy exactly, in XLA and compiled."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from attention_kernels import ready_kernel
from kernels_pallas.choice import KernelUnavailable
from kernels_pallas.int8 import project, quantize, rotate
from kernels_pallas.projection import pack as pack_into
from kernels_pallas.projection import packed_shape, pick_largest, project_int8


@jax.jit
def run(x, w, scales):
    """Multiply with weights as they are, or packed."""
    return project(x, w, scales) if w.ndim == 2 else project_int8(x, w, scales)


F32 = np.float32


@pytest.fixture
def native():
    try:
        ready_kernel("native")
    except KernelUnavailable as error:
        pytest.skip(str(error))


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, F32)


def pack(values):
    packed = np.empty(packed_shape(*values.shape, dtype="int8"), "int8")
    pack_into(values, packed[0])
    return packed


def hadamard(row):
    """Sums and differences of the halves, then of their halves; unlike any path of ours."""
    if len(row) == 1:
        return row
    first, second = np.split(row, 2)
    return np.concatenate([hadamard(first + second), hadamard(first - second)])


def exact(x, values, scales):
    """The definition, with sums in int64 and each rounding of floats written out."""
    num_inputs = x.shape[1]
    size = np.gcd(num_inputs, 64)
    out = np.zeros((len(x), len(values)), F32)
    for token, row in enumerate(x):
        rotated = np.concatenate([hadamard(part) for part in row.reshape(-1, size)])
        largest = max(np.abs(rotated).max(), F32(1e-30))
        rounded = np.rint(rotated * (F32(127) / largest)).astype(np.int64)
        sums = values.astype(np.int64) @ rounded
        scale = largest * F32(1 / (127 * np.sqrt(size)))
        out[token] = sums.astype(F32) * scale * scales
    return out


def test_weights_are_steps_of_the_largest_of_each_output():
    values, scales = quantize(np.array([[0.5, -1, 0.25], [0, 254, 2], [0, 0, 0]]))
    assert values.dtype == np.int8
    assert values.tolist() == [[64, -127, 32], [0, 127, 1], [0, 0, 0]]
    assert scales.tolist() == [F32(1 / 127), 2, F32(1e-30) / F32(127)]


@pytest.mark.parametrize(("num_inputs", "together"), [(576, 64), (96, 32), (50, 2), (7, 1)])
def test_rotation_changes_no_product_and_spreads_what_is_large(num_inputs, together):
    x, w = np.eye(num_inputs)[:3] * 100, numbers(0, 5, num_inputs).astype(np.float64)
    np.testing.assert_allclose(rotate(x) @ rotate(w).T, x @ w.T, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(np.abs(rotate(x)).max(axis=1), 100 / np.sqrt(together))


@pytest.mark.parametrize("num_tokens", [1, 2, 9])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(3, 7), (32, 96), (40, 576)])
def test_xla_has_the_bits_of_the_definition(num_tokens, num_outputs, num_inputs):
    x = numbers(0, num_tokens, num_inputs) * 10
    values, scales = quantize(numbers(1, num_outputs, num_inputs))
    np.testing.assert_array_equal(run(x, values, scales), exact(x, values, scales))


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 130, 300])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(32, 64), (96, 576), (4128, 128)])
def test_the_compiled_product_has_them_too(num_tokens, num_outputs, num_inputs, native):
    x = numbers(0, num_tokens, num_inputs) * 10
    values, scales = quantize(numbers(1, num_outputs, num_inputs))
    expected = exact(x[-40:], values, scales)
    np.testing.assert_array_equal(np.asarray(run(x, pack(values), scales))[-40:], expected)


@pytest.mark.parametrize("num_tokens", [1, 8, 17, 64])
def test_the_largest_output_of_a_row_is_picked(num_tokens, native):
    x = numbers(0, num_tokens, 128)
    values, scales = quantize(numbers(1, 4128, 128))
    picked = jax.jit(pick_largest)(x, pack(values), scales)
    np.testing.assert_array_equal(picked, exact(x, values, scales).argmax(axis=1))


@pytest.mark.parametrize("packed", [False, True])
def test_the_largest_sums_are_exact(packed, native):
    """One number in each block of 64: rotated, all have its size."""
    x, w = np.zeros((20, 1536), F32), np.zeros((32, 1536), F32)
    x[:, ::64], w[:, ::64], w[1::2, ::64] = 3, 2, -2
    values, scales = quantize(w)
    assert set(np.abs(values).ravel()) == {127}
    out = np.asarray(run(x, pack(values) if packed else values, scales))
    np.testing.assert_array_equal(out, exact(x, values, scales))
    np.testing.assert_allclose(np.abs(out), 24 * 3 * 2, rtol=1e-6)


def test_the_product_is_close_to_that_of_floats(native):
    x, w = numbers(0, 50, 576), numbers(1, 320, 576)
    x[:, 5] *= 50  # what would cost every other number of its row its precision
    values, scales = quantize(w)
    error = np.asarray(run(x, pack(values), scales)) - x.astype(np.float64) @ w.T.astype(np.float64)
    # Rotated, the largest of a row is about 50 / 8 + 3, of weights 4; each is off by up to half a
    # step. Without the rotation rows alone would add more than 0.11 * sqrt(576) = 2.7.
    assert np.sqrt((error**2).mean()) < 0.7


@pytest.mark.parametrize("packed", [False, True])
def test_a_token_has_the_same_bits_whatever_it_is_computed_with(packed, native):
    x = numbers(0, 300, 192)
    values, scales = quantize(numbers(1, 96, 192))
    w = pack(values) if packed else values
    whole = np.asarray(run(x, w, scales))
    for start, end in ((0, 1), (3, 5), (10, 43), (100, 229)):
        np.testing.assert_array_equal(run(x[start:end], w, scales), whole[start:end])


def test_rows_so_long_that_few_fit_into_a_cache_are_all_computed(native):
    x = numbers(0, 512, 28672)
    values, scales = quantize(numbers(1, 256, 28672))
    whole = np.asarray(run(x, pack(values), scales))
    np.testing.assert_array_equal(whole[-3:], exact(x[-3:], values, scales))


@pytest.mark.parametrize("packed", [False, True])
def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other(packed, native):
    x = numbers(0, 40, 128)
    values, scales = quantize(numbers(1, 32, 128))
    w = pack(values) if packed else values
    expected = np.array(run(x, w, scales))
    x[3, 100], x[20, 0], x[21] = np.nan, np.inf, 0
    out = np.asarray(run(x, w, scales))
    assert np.isnan(out[[3, 20]]).all()
    assert not out[21].any()
    kept = np.delete(np.arange(40), [3, 20, 21])
    np.testing.assert_array_equal(out[kept], expected[kept])


def test_activations_may_have_another_type(native):
    x = numbers(0, 9, 64).astype(ml_dtypes.bfloat16)
    values, scales = quantize(numbers(1, 32, 64))
    expected = exact(x.astype(F32), values, scales)
    for w in (values, pack(values)):
        np.testing.assert_array_equal(run(x, w, scales), expected)


def test_sizes_that_do_not_fit_are_named():
    values, scales = quantize(numbers(0, 32, 64))
    with pytest.raises(ValueError, match="128 inputs do not fit weights for 64"):
        project_int8(jnp.zeros((2, 128)), pack(values), scales)
