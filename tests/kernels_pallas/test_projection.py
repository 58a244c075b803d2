"""Products with packed weights against NumPy, and that tokens do not know of each other."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from attention_kernels import can_project
from kernels_pallas.projection import (
    RowNorm,
    can_pack,
    pack,
    packed_shape,
    pick_largest,
    project,
    unpacked_shape,
)

run = jax.jit(project)


def packed_of(w):
    packed = np.empty(packed_shape(*w.shape), w.dtype)
    pack(w, packed[0])
    return packed


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)


@pytest.fixture
def native():
    if not can_project():
        pytest.skip("no compiler here, or no instructions for bfloat16")


@pytest.mark.parametrize(("dtype", "per_word"), [("int16", 2), ("bfloat16", 2), ("int8", 4)])
def test_packed_weights_are_words_of_inputs_with_sixteen_outputs_side_by_side(dtype, per_word):
    w = (np.arange(32 * 64) % 251 - 125).astype(dtype).reshape(32, 64)
    packed, depth = np.empty(packed_shape(32, 64, dtype=dtype), dtype), 16 * per_word
    assert packed.shape == (1, 2, 64 // depth, 16, 16, per_word)
    pack(w, packed[0])
    for output, number in ((0, 0), (1, 0), (17, 37), (31, 63)):
        tile, word = number // depth, number % depth // per_word
        assert (
            packed[0, output // 16, tile, word, output % 16, number % per_word] == w[output, number]
        )
    assert unpacked_shape(packed_shape(32, 64, dtype=dtype, num_layers=7)) == (32, 64)


def test_weights_may_lie_in_any_order_and_type():
    w = np.arange(32 * 64, dtype=np.float32).reshape(32, 64)
    packed = np.empty(packed_shape(64, 32), np.float32)
    pack(w.T, packed[0])
    np.testing.assert_array_equal(packed, packed_of(w.T.copy()))


def test_whole_panels_and_tiles_can_be_packed():
    assert can_pack(32, 32)
    assert can_pack(49152, 576)
    assert not can_pack(48, 32)
    assert not can_pack(32, 48)
    assert can_pack(49152, 576, dtype="int8")
    assert not can_pack(32, 32, dtype="int8")


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 130, 300])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(32, 32), (96, 64), (4128, 96)])
def test_it_multiplies(num_tokens, num_outputs, num_inputs, native):
    x, w = numbers(0, num_tokens, num_inputs), numbers(1, num_outputs, num_inputs)
    expected = x.astype(np.float64) @ w.astype(np.float64).T
    # Products of bfloat16 are exact in f32; each of up to 96 sums of some tens rounds by 2^-24.
    np.testing.assert_allclose(run(x, packed_of(w)), expected, rtol=0, atol=1e-4)


def test_activations_are_rounded_to_bfloat16(native):
    x = np.full((3, 32), 1 + 2**-9, np.float32)  # halfway between two, to even
    w = np.ones((32, 32), ml_dtypes.bfloat16)
    assert np.asarray(run(x, packed_of(w))).tolist() == [[32.0] * 32] * 3


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(96, 576), (4096, 64)])
def test_a_token_has_the_same_bits_whatever_it_is_computed_with(num_outputs, num_inputs, native):
    x, packed = numbers(0, 300, num_inputs), packed_of(numbers(1, num_outputs, num_inputs))
    whole = np.asarray(run(x, packed))
    for start, end in ((0, 1), (299, 300), (3, 5), (10, 26), (10, 43), (100, 229)):
        np.testing.assert_array_equal(run(x[start:end], packed), whole[start:end])


def test_rows_so_long_that_few_fit_into_a_cache_are_all_computed(native):
    """Of a model with 14,336 hidden numbers, 36 tokens are a part: 512 are no multiple of it."""
    x, packed = numbers(0, 512, 14336), packed_of(numbers(1, 512, 14336))
    whole = np.asarray(run(x, packed))
    for start, end in ((0, 1), (30, 40), (500, 512)):
        np.testing.assert_array_equal(run(x[start:end], packed), whole[start:end])


def test_only_the_rows_that_are_wanted_are_computed(native):
    x, packed = numbers(0, 40, 64), packed_of(numbers(1, 96, 64))
    wanted = np.arange(40) % 3 == 1
    some = np.asarray(jax.jit(lambda x: project(x, packed, wanted_T=wanted))(x))
    np.testing.assert_array_equal(some[wanted], np.asarray(run(x, packed))[wanted])


@jax.jit
def pick(x, w, wanted=None):
    return pick_largest(x, w, None, wanted_T=wanted)


@pytest.mark.parametrize("num_tokens", [1, 8, 17, 33, 64, 300])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(32, 32), (96, 64), (4128, 96)])
def test_the_largest_output_of_a_row_is_picked(num_tokens, num_outputs, num_inputs, native):
    # Small integers, of which all sums are exact, and many alike.
    random = np.random.default_rng(num_tokens)
    x = random.integers(-2, 3, (num_tokens, num_inputs))
    w = random.integers(-2, 3, (num_outputs, num_inputs))
    products = x @ w.T
    picked = pick(x.astype(np.float32), packed_of(w.astype(ml_dtypes.bfloat16)))
    np.testing.assert_array_equal(picked, products.argmax(axis=1))  # the first of several


def test_rows_that_are_not_wanted_get_the_first_output(native):
    x, packed = numbers(0, 40, 64), packed_of(numbers(1, 96, 64))
    wanted = np.arange(40) % 3 == 1
    largest = np.asarray(run(x, packed)).argmax(axis=1)
    np.testing.assert_array_equal(pick(x, packed, wanted), np.where(wanted, largest, 0))
    assert np.asarray(pick(x, packed, np.zeros(40, bool))).tolist() == [0] * 40


def test_rows_without_a_number_get_the_first_output(native):
    x = numbers(0, 3, 32)
    x[1, 5] = np.nan
    picked = np.asarray(pick(x, packed_of(numbers(1, 64, 32))))
    others = np.asarray(pick(x[[0, 2]], packed_of(numbers(1, 64, 32))))
    assert picked.tolist() == [others[0], 0, others[1]]


def test_rows_go_through_a_norm_before_they_pick(native):
    x, w = np.array([[1, -1] * 16], np.float32), np.eye(32, dtype=ml_dtypes.bfloat16)
    scale = np.arange(1, 33, dtype=np.float32) % 31  # 30 is of a negative number
    norm = RowNorm(jnp.asarray(scale), 1e-5)
    picked = jax.jit(lambda x, w: pick_largest(x, w, None, norm=norm))(x, packed_of(w))
    assert np.asarray(picked).tolist() == [28]


def test_nothing_is_computed_if_nothing_is_wanted(native):
    packed = packed_of(numbers(1, 32, 32))
    nobody = np.zeros(3, bool)
    assert jax.jit(lambda x: project(x, packed, wanted_T=nobody))(numbers(0, 3, 32)).shape == (
        3,
        32,
    )


def test_weights_of_several_layers_are_refused():
    with pytest.raises(ValueError, match="weights of 2 layers are no single product's"):
        project(jnp.zeros((2, 32)), jnp.zeros(packed_shape(32, 32, num_layers=2)))


def through_norm(x, scale, eps):
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps) * scale


def rounded_product(x, w):
    """In float64, of rows that are rounded to bfloat16."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float64) @ w.astype(np.float64).T


@pytest.mark.parametrize("num_tokens", [1, 5, 33, 300])
def test_rows_go_through_a_norm_first(num_tokens, native):
    random = np.random.default_rng(2)
    x = (
        random.standard_normal((num_tokens, 96)) * random.uniform(0.01, 100, (num_tokens, 1))
    ).astype(np.float32)
    scale, w = random.uniform(0.5, 2, 96).astype(np.float32), numbers(1, 64, 96)
    norm = RowNorm(jnp.asarray(scale), 1e-5)
    out = jax.jit(lambda x, w: project(x, w, norm=norm))(x, packed_of(w))
    expected = rounded_product(through_norm(x, scale, 1e-5), w)
    # A number that f32 moves over the middle of two is rounded the other way: 2^-8 of it, times w.
    np.testing.assert_allclose(out, expected, rtol=0, atol=0.1)
    assert np.abs(out - expected).mean() < 1e-3


def test_rows_are_prepared_alike_whatever_they_are_computed_with(native):
    random = np.random.default_rng(4)
    x = random.standard_normal((300, 192)).astype(np.float32)
    packed = packed_of(numbers(1, 64, 192))
    norm = RowNorm(jnp.asarray(random.uniform(0.5, 2, 192), jnp.float32), 1e-5)
    call = jax.jit(lambda x: project(x, packed, norm=norm))
    whole = np.asarray(call(x))
    for start, end in ((0, 1), (299, 300), (3, 5), (10, 43), (100, 229)):
        np.testing.assert_array_equal(call(x[start:end]), whole[start:end])


def test_a_norm_that_does_not_fit_is_named():
    norm = RowNorm(jnp.ones(32), 1e-5)
    with pytest.raises(ValueError, match="a norm of 32 does not fit 64 inputs"):
        project(jnp.zeros((2, 64)), jnp.zeros(packed_shape(32, 64)), norm=norm)


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="64 inputs do not fit weights for 32"):
        project(jnp.zeros((2, 64)), jnp.zeros(packed_shape(32, 32)))
