"""Packed codes, and products that read them instead of the numbers that they stand for."""

import jax
import ml_dtypes
import numpy as np
import pytest

from attention_kernels import can_project, reads_codes
from engine_builder import random_codes
from kernels_pallas.group_codes import GROUP, GroupCodes, pack_codes, packed_codes_shape
from kernels_pallas.projection import pack, packed_shape, pick_largest, project

run = jax.jit(project)
MANY = 20  # tokens, so many that none of their products reads codes


def packed_codes_of(codes, bits):
    packed = np.empty(packed_codes_shape(*codes.codes.shape, bits=bits), np.uint8)
    pack_codes(codes, packed[0])
    return packed


def packed_numbers_of(codes):
    numbers = codes.numbers().astype(ml_dtypes.bfloat16)
    packed = np.empty(packed_shape(*numbers.shape), numbers.dtype)
    pack(numbers, packed[0])
    return packed


@pytest.fixture
def native():
    if not can_project():
        pytest.skip("no compiler here, or no instructions for bfloat16")


def test_a_number_is_scale_times_code_plus_minimum():
    codes = np.zeros((16, 64), np.uint8)
    codes[3, 31], codes[3, 32] = 15, 15
    scales, minima = np.ones((16, 2), np.float16), np.zeros((16, 2), np.float16)
    scales[3], minima[3] = (0.5, 2), (-1, 7)
    numbers = GroupCodes(codes, scales, minima).numbers()
    assert numbers[3, 30:34].tolist() == [-1, 6.5, 37, 7]
    assert not np.delete(numbers, 3, axis=0).any()


@pytest.mark.parametrize("bits", [4, 8])
def test_pairs_of_inputs_lie_together_for_eight_outputs_at_a_time(bits):
    weights = random_codes("order", 32, 96, bits=bits)
    packed = packed_codes_of(weights, bits)
    assert packed.shape == (1, 2, 3, bits + 1, 64)
    for output, number in ((0, 0), (0, 1), (1, 2), (7, 31), (8, 0), (15, 17), (16, 32), (31, 95)):
        group = packed[0, output // 16, number // GROUP]
        half, lane = output % 16 // 8, output % 8 * 2 + number % 2
        piece = number % GROUP // 2 * 2 + half
        if bits == 4:
            word = int.from_bytes(group[piece // 8, lane * 4 : lane * 4 + 4].tobytes(), "little")
            found = word >> piece % 8 * 4 & 15
        else:
            found = group[: bits * 1].reshape(-1)[piece * 16 + lane].astype(np.int8)
        assert found == weights.codes[output, number]
        last = group[bits].view(np.float16)
        assert last[output % 16] == weights.scales[output, number // GROUP]
        assert last[16 + output % 16] == weights.minima[output, number // GROUP]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(32, 32), (96, 576), (4128, 96)])
def test_tokens_get_the_same_bits_from_codes(num_outputs, num_inputs, bits, native):
    codes = random_codes("same", num_outputs, num_inputs, bits=bits)
    numbers, packed = packed_numbers_of(codes), packed_codes_of(codes, bits)
    x = np.random.default_rng(0).standard_normal((MANY, num_inputs), np.float32)
    expected = np.asarray(run(x, numbers))
    exact = x.astype(ml_dtypes.bfloat16).astype(np.float64) @ codes.numbers().T
    np.testing.assert_allclose(expected, exact, rtol=0, atol=0.01 * np.abs(exact).max())
    for num_tokens in (*range(1, 10), MANY):
        some = np.asarray(run(x[-num_tokens:], numbers, packed))
        np.testing.assert_array_equal(some, expected[-num_tokens:])
        picked = jax.jit(pick_largest)(x[-num_tokens:], numbers, None, packed)
        np.testing.assert_array_equal(picked, expected[-num_tokens:].argmax(axis=1))


@pytest.mark.parametrize("bits", [4, 8])
def test_few_tokens_read_codes_and_many_the_numbers(bits):
    if not reads_codes():
        pytest.skip("no products here that read codes")
    codes = random_codes("read", 64, 64, bits=bits)
    others = GroupCodes(codes.codes, -codes.scales, -codes.minima)
    numbers, packed = packed_numbers_of(codes), packed_codes_of(others, bits)
    x = np.random.default_rng(0).standard_normal((MANY, 64), np.float32)
    expected = np.asarray(run(x, numbers))
    np.testing.assert_array_equal(run(x[:1], numbers, packed), -expected[:1])
    np.testing.assert_array_equal(run(x[:4], numbers, packed), -expected[:4])
    np.testing.assert_array_equal(run(x, numbers, packed), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_between_two_round_to_even_and_zeros_stay(bits, native):
    """Codes of 1 to 15 over a minimum of 256 end in bits that bfloat16 does not have."""
    codes = random_codes("rounded", 32, 32, bits=bits).codes
    scales = np.full((32, 1), 0.5, np.float16)
    minima = np.where(np.arange(32)[:, None] % 2, 256, 0).astype(np.float16)
    weights = GroupCodes(codes, -scales, minima)
    x = np.eye(32, dtype=np.float32)
    got = np.concatenate(
        [run(row[None], packed_numbers_of(weights), packed_codes_of(weights, bits)) for row in x]
    )
    np.testing.assert_array_equal(got.T, weights.numbers().astype(ml_dtypes.bfloat16))
