import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compile_cache import use_compile_cache
from engine_builder import HF_CONFIG
from jaxengine.models.config import ModelConfig
from jaxengine.models.layers import (
    Linear,
    RMSNorm,
    apply_rope,
    project,
    rope_frequencies,
    rope_tables,
    row_mean,
)

# From the smallest bucket on.
ROWS = [8, 9, 13, 16, 64, 100, 256]


@pytest.fixture(autouse=True)
def compile_cache():
    use_compile_cache()


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_a_linear_layer_is_x_times_the_transposed_weight_plus_bias():
    linear = Linear(2, 3, bias=True, dtype=jnp.float32, packed=False)
    linear.weight[...] = jnp.array([[1.0, 2], [3, 4], [5, 6]])
    linear.bias[...] = jnp.array([10.0, 20, 30])
    # 1 * 1 + 2 * 10 + 10, 3 * 1 + 4 * 10 + 20, 5 * 1 + 6 * 10 + 30
    np.testing.assert_array_equal(linear(jnp.array([[1.0, 10.0]])), [[31, 63, 95]])


def test_a_linear_layer_of_eight_bits_multiplies_its_scales_and_adds_its_bias():
    linear = Linear(3, 2, bias=True, dtype=jnp.int8, packed=False)
    linear.weight[...] = jnp.array([[1, 2, 3], [4, 5, -6]], jnp.int8)
    linear.weight_scale[...] = jnp.array([0.5, 2.0])
    linear.bias[...] = jnp.array([10.0, 20])
    # 127 * 1 - 64 * 3, 127 * 4 + 64 * 6; then the scales.
    y = linear(jnp.array([[127.0, 0, -63.6]]))
    np.testing.assert_allclose(y, [[10 - 32.5, 20 + 1784]], rtol=1e-6)


def test_a_linear_layer_of_eight_bit_floats_does_likewise():
    linear = Linear(3, 2, bias=True, dtype=jnp.float8_e4m3fn, packed=False)
    linear.weight[...] = jnp.array([[1, 2, 3], [4, 5, -6]], jnp.float8_e4m3fn)
    linear.weight_scale[...] = jnp.array([0.5, 2.0])
    linear.bias[...] = jnp.array([10.0, 20])
    # 448 * 1 - 240 * 3, 448 * 4 + 240 * 6: 236 is between 224 and 240; then the scales.
    y = linear(jnp.array([[448.0, 0, -236]]))
    np.testing.assert_allclose(y, [[10 - 136, 20 + 6464]], rtol=1e-6)


def test_a_linear_layer_without_bias_has_none():
    assert Linear(2, 3, bias=False, dtype=jnp.float32, packed=False).bias is None


def test_a_bf16_product_rounds_x_once_and_sums_in_f32(rng):
    x = rng.standard_normal((4, 256), np.float32)
    w = rng.standard_normal((32, 256), np.float32).astype(jnp.bfloat16)
    rounded = x.astype(jnp.bfloat16).astype(np.float64)
    y = project(x, w)
    assert y.dtype == jnp.float32
    # f32 sums of 256 products around 1; a bf16 sum would be off by 0.05.
    np.testing.assert_allclose(y, rounded @ w.astype(np.float64).T, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (96, 64), (576, 960), (1536, 576)])
def test_a_row_of_a_product_has_the_same_bits_in_any_number_of_rows(rng, inputs, outputs, dtype):
    x = rng.standard_normal((max(ROWS), inputs), np.float32)
    w = rng.standard_normal((outputs, inputs), np.float32).astype(jnp.dtype(dtype))
    product = jax.jit(project)
    whole = np.asarray(product(x, w))
    for rows in ROWS:
        np.testing.assert_array_equal(product(x[:rows], w), whole[:rows])
        np.testing.assert_array_equal(product(x[-rows:], w), whole[-rows:])


@pytest.mark.parametrize("width", [16, 64, 576, 1000])
def test_a_row_mean_has_the_same_bits_in_any_number_of_rows(rng, width):
    x = rng.standard_normal((max(ROWS), width), np.float32)
    mean = jax.jit(row_mean)
    whole = np.asarray(mean(x))
    np.testing.assert_allclose(whole[:, 0], x.astype(np.float64).mean(-1), rtol=0, atol=1e-6)
    for rows in ROWS:
        np.testing.assert_array_equal(mean(x[:rows]), whole[:rows])


def test_a_norm_divides_by_the_root_mean_square():
    norm = RMSNorm(2, eps=0.5)
    norm.scale[...] = jnp.array([1.0, 10.0])
    # mean of squares (9 + 16) / 2 = 12.5; sqrt(12.5 + 0.5) = sqrt(13)
    expected = [[3 / math.sqrt(13), 40 / math.sqrt(13)]] * 2
    np.testing.assert_allclose(
        norm(jnp.array([[3.0, 4.0], [3.0, -4.0]])),
        [expected[0], [expected[0][0], -expected[0][1]]],
        rtol=1e-6,
    )


def test_frequencies_fall_from_one_by_the_base():
    config = ModelConfig.from_hf({**HF_CONFIG, "head_dim": 4, "rope_theta": 100.0})
    assert rope_frequencies(config) == pytest.approx((1.0, 0.1))


def test_llama3_scaling_keeps_short_waves_stretches_long_ones_and_blends_between():
    """By hand: context 1000, factor 4, low 1, high 4 turns per context.

    Frequencies 100^(-i/4) for i = 0 .. 3 are 1, 0.316228, 0.1, 0.0316228; their turns in 1000
    positions are 159, 50, 15.9, 5.03: all above 4, so they stay. With a context of 100: 15.9 and
    5.03 stay; 1.592 blends with weight (1.592 - 1) / 3 = 0.19718; 0.503 is divided by 4.
    """
    hf = {**HF_CONFIG, "head_dim": 8, "rope_theta": 100.0}
    scaling = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 1000}
    long = rope_frequencies(ModelConfig.from_hf({**hf, "rope_scaling": scaling}))
    assert long == pytest.approx((1.0, 0.316228, 0.1, 0.0316228), rel=1e-5)
    scaling["original_max_position_embeddings"] = 100
    short = rope_frequencies(ModelConfig.from_hf({**hf, "rope_scaling": scaling}))
    blended = (1 - 0.19718) * 0.1 / 4 + 0.19718 * 0.1
    assert short == pytest.approx((1.0, 0.316228, blended, 0.0316228 / 4), rel=1e-4)


def test_rotation_turns_the_first_half_against_the_second():
    # Head (1, 2, 3, 4) at position 1 with angles pi/2 and pi: (1, 3) -> (-3, 1), (2, 4) -> (-2, -4)
    rope = rope_tables(jnp.array([1]), (math.pi / 2, math.pi))
    rotated = apply_rope(jnp.array([[[1.0, 2.0, 3.0, 4.0]]]), rope)
    np.testing.assert_allclose(rotated, [[[-3, -2, 1, -4]]], atol=1e-6)


def test_position_zero_is_not_rotated(rng):
    x = rng.standard_normal((1, 2, 8), np.float32)
    np.testing.assert_array_equal(
        apply_rope(x, rope_tables(jnp.array([0]), (1.0, 0.5, 0.2, 0.1))), x
    )


def test_angles_of_late_positions_are_exact_to_f32():
    """f32 products of position and frequency are off by half a unit in their last place."""
    frequencies = (1.0, 0.75, 0.1)
    cos, sin = rope_tables(jnp.array([8191]), frequencies)
    angles = [8191 * f for f in frequencies]
    np.testing.assert_allclose(cos[0, 0], np.cos(angles), atol=5e-4)
    np.testing.assert_allclose(sin[0, 0], np.sin(angles), atol=5e-4)
