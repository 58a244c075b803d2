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
