import gguf
import numpy as np
import pytest

from jaxengine.weights.gguf_quants import BLOCK_FORMATS, CHUNK_BLOCKS, dequantize


@pytest.mark.parametrize("type_id", BLOCK_FORMATS, ids=lambda i: BLOCK_FORMATS[i].name)
def test_any_bytes_decode_as_in_the_gguf_package(type_id):
    block_format = BLOCK_FORMATS[type_id]
    oracle_type = gguf.GGMLQuantizationType(type_id)
    assert oracle_type.name == block_format.name
    sizes = gguf.GGML_QUANT_SIZES[oracle_type]
    assert sizes == (block_format.block_elements, block_format.block_bytes)
    num_blocks = CHUNK_BLOCKS + 3
    raw = np.random.default_rng(0).integers(
        0, 256, (num_blocks, block_format.block_bytes), dtype=np.uint8
    )
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw.reshape(1, -1), oracle_type).view(np.float32).ravel()
    ours = dequantize(block_format, raw.ravel(), num_blocks * block_format.block_elements)
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, expected)


def test_a_q4_1_block_is_scale_times_level_plus_minimum():
    half = lambda x: np.frombuffer(np.float16(x).tobytes(), np.uint8)  # noqa: E731
    # Byte i holds element i in its low and element 16 + i in its high nibble.
    levels = np.arange(16, dtype=np.uint8) | (15 << 4)
    block = np.concatenate((half(0.5), half(-1.0), levels))
    expected = [0.5 * i - 1 for i in range(16)] + [0.5 * 15 - 1] * 16
    assert dequantize(BLOCK_FORMATS[3], block, 32).tolist() == expected


@pytest.mark.parametrize(("type_id", "bits"), [(2, 4), (3, 4), (8, 8)])
def test_a_block_splits_into_codes_that_it_is_decoded_from(type_id, bits):
    block_format = BLOCK_FORMATS[type_id]
    assert block_format.code_bits == bits
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (500, block_format.block_bytes), dtype=np.uint8)
    head = block_format.block_bytes - 4 * bits  # scale, and minimum if there is one
    blocks[:, :head] = rng.standard_normal((500, 2)).astype(np.float16).view(np.uint8)[:, :head]
    codes, scales, minima = block_format.split(blocks)
    assert codes.max() == {4: 15, 8: 127}[bits]
    assert codes.min() == {4: 0, 8: -128}[bits]
    numbers = scales[:, None].astype(np.float32) * codes + minima[:, None].astype(np.float32)
    np.testing.assert_array_equal(numbers, block_format.decode(blocks))


def test_other_blocks_have_no_codes():
    coded = [f.name for f in BLOCK_FORMATS.values() if f.split is not None]
    assert coded == ["Q4_0", "Q4_1", "Q8_0"]
    assert coded == [f.name for f in BLOCK_FORMATS.values() if f.code_bits is not None]
