"""Products of eight-bit floats: against sums of NumPy in float64, rounded by hand."""

import jax
import numpy as np
import pytest

from kernels_pallas.fp8 import DTYPE, find_fault, project, quantize

F32 = np.float32


class Device:
    """As JAX describes one; CPUs have no capability."""

    def __init__(self, kind, capability=None):
        self.device_kind = kind
        if capability is not None:
            self.compute_capability = capability


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, F32)


def all_values():
    """Every number that four bits of exponent and three of mantissa have; the largest is 448."""
    subnormal = [m / 8 * 2.0**-6 for m in range(8)]
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    positive = [*subnormal, *normal[:-1]]  # the last would be 480; it stands for no number
    return np.unique(np.array([-x for x in positive] + positive))


def rounded(x):
    """The nearest of them, in float64; where two are as near, the one with the even mantissa."""
    values, order = all_values(), np.abs(x)
    exponent = np.maximum(np.floor(np.log2(np.maximum(order, 1e-30))), -6)
    step = 2.0 ** (exponent - 3)
    nearest = np.rint(x.astype(np.float64) / step) * step
    assert np.isin(nearest, values).all()
    return nearest


def exact(x, values, scales):
    """The definition, with sums in float64."""
    largest = np.maximum(np.abs(x).max(axis=1, keepdims=True), F32(1e-30))
    sums = rounded(x * (F32(448) / largest)) @ values.astype(np.float64).T
    return sums * (largest.astype(np.float64) / 448) * scales


run = jax.jit(project)


def test_weights_are_parts_of_the_largest_of_each_output():
    values, scales = quantize(np.array([[0.5, -1, 0.3], [0, 448, 2.1], [0, 0, 0]]))
    assert values.dtype == DTYPE
    # 448 * 0.3 = 134.4 lies between 128 and 144, and 2.1 between 2 and 2.25.
    assert values.astype(F32).tolist() == [[224, -448, 128], [0, 448, 2], [0, 0, 0]]
    assert scales.tolist() == [F32(1 / 448), 1, F32(1e-30) / F32(448)]


def test_weights_are_rounded_to_the_nearest():
    w = numbers(0, 64, 96)
    values, scales = quantize(w)
    np.testing.assert_array_equal(values.astype(np.float64), rounded(w / scales[:, None]))
    # Half of the last of three bits of the mantissa, but for the smallest.
    error = np.abs(values.astype(np.float64) * scales[:, None] - w)
    assert (error <= np.maximum(np.abs(w) / 16, scales[:, None] / 1024) * (1 + 1e-6)).all()


@pytest.mark.parametrize("num_tokens", [2, 9])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(3, 7), (40, 576)])
def test_a_product_is_that_of_rounded_numbers(num_tokens, num_outputs, num_inputs):
    x = numbers(0, num_tokens, num_inputs) * 10
    values, scales = quantize(numbers(1, num_outputs, num_inputs))
    out = run(x, values, scales)
    assert out.dtype == F32
    # Sums of some hundred products around 10: f32 is off in the sixth digit at most.
    np.testing.assert_allclose(out, exact(x, values, scales), rtol=0, atol=2e-4)


def test_the_product_is_close_to_that_of_floats_even_beside_what_is_large():
    x, w = numbers(0, 50, 576), numbers(1, 320, 576)
    x[:, 5] *= 50
    error = np.asarray(run(x, *quantize(w))) - x.astype(np.float64) @ w.T.astype(np.float64)
    # A rounded number is off by 1/16 at most, by 2.6 % on average, a product by 3.7 %: of the
    # large one, around 50 in size, as much as of 575 others together.
    assert np.sqrt((error**2).mean()) < 0.045 * np.sqrt(50**2 + 575)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(96, 192), (1536, 576)])
def test_a_token_has_the_same_bits_whatever_it_is_computed_with(num_outputs, num_inputs):
    x = numbers(0, 300, num_inputs)
    values, scales = quantize(numbers(1, num_outputs, num_inputs))
    whole = np.asarray(run(x, values, scales))
    for start, end in ((0, 2), (3, 11), (10, 43), (100, 229)):
        np.testing.assert_array_equal(run(x[start:end], values, scales), whole[start:end])


def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other():
    x = numbers(0, 40, 128)
    values, scales = quantize(numbers(1, 32, 128))
    expected = np.array(run(x, values, scales))
    x[3, 100], x[20, 0], x[21] = np.nan, np.inf, 0
    out = np.asarray(run(x, values, scales))
    assert np.isnan(out[[3, 20]]).all()
    assert not out[21].any()
    kept = np.delete(np.arange(40), [3, 20, 21])
    np.testing.assert_array_equal(out[kept], expected[kept])


@pytest.mark.parametrize("capability", ["8.9", "9.0", "10.0", "12.1"])
def test_gpus_with_such_products_have_no_fault(capability):
    assert find_fault(Device("NVIDIA", capability)) is None


@pytest.mark.parametrize(
    ("device", "found"),
    [
        (Device("cpu"), "this is cpu"),
        (Device("NVIDIA A100-SXM4-80GB", "8.0"), "NVIDIA A100-SXM4-80GB has 8.0"),
        (Device("AMD Instinct MI300X", "gfx942"), "this is AMD Instinct MI300X"),
    ],
)
def test_other_devices_are_refused_by_name(device, found):
    expected = f"fp8 needs an NVIDIA GPU of compute capability 8.9 or above, and {found}"
    assert find_fault(device) == expected
