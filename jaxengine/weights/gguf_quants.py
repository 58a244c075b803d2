"""Block formats of GGUF tensors, to float32 in plain numpy.

A block holds a fixed number of consecutive elements of a row: packed integers plus float16 scales.
Supported: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kernels_pallas.group_codes import CodeBits

__all__ = ["BLOCK_FORMATS", "BlockFormat", "dequantize"]

# Blocks handled at once: the temporaries of a chunk stay in the processor's cache.
CHUNK_BLOCKS = 4096

type Codes = np.ndarray[tuple[int, ...], np.dtype[np.uint8 | np.int8]]
type Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
type Halves = np.ndarray[tuple[int, ...], np.dtype[np.float16]]
type Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How one tensor type stores its elements.

    Attributes:
        name: GGML's name of the type.
        block_elements: elements in a block.
        block_bytes: bytes of a block.
        decode: u8[blocks, block_bytes] to f32[blocks, block_elements].
        code_bits: of the codes that `split` gives; None if the type has no such.
        split: the codes, [blocks, block_elements], and the scale and the minimum of each block,
            f16[blocks], such that `decode` gives scale * code + minimum.
    """

    name: str
    block_elements: int
    block_bytes: int
    decode: Callable[[Bytes], Floats]
    code_bits: CodeBits | None = None
    split: Callable[[Bytes], tuple[Codes, Halves, Halves]] | None = None


def dequantize(block_format: BlockFormat, data: np.ndarray, num_elements: int) -> np.ndarray:
    """Decode `num_elements` elements from the flat bytes u8[n] in `data` to f32[num_elements]."""
    blocks = data.reshape(-1, block_format.block_bytes)
    if block_format.block_elements == 1:
        return block_format.decode(blocks).reshape(num_elements)
    out = np.empty((len(blocks), block_format.block_elements), np.float32)
    # Damaged scales may be infinite or NaN; whoever loads the weights judges that.
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(blocks), CHUNK_BLOCKS):
            chunk = blocks[start : start + CHUNK_BLOCKS]
            out[start : start + CHUNK_BLOCKS] = block_format.decode(chunk)
    return out.reshape(num_elements)


def _stored_half(blocks: Bytes, start: int) -> Halves:
    """The float16 at byte `start` of each block, f16[blocks]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2")[:, 0]


def _half(blocks: Bytes, start: int) -> Floats:
    """The same as f32[blocks, 1]."""
    return _stored_half(blocks, start).astype(np.float32)[:, None]


def _nibbles(packed: Bytes) -> Bytes:
    """Low nibbles of all bytes, then high nibbles: u8[blocks, n] to u8[blocks, 2n]."""
    return np.concatenate((packed & 15, packed >> 4), axis=1)


def _bits(packed: Bytes) -> Bytes:
    """Bits of a little-endian word: u8[blocks, n] to u8[blocks, 8n] of 0 and 1."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def _f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4").astype(np.float32, copy=False)


def _f16(blocks: Bytes) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _split_q4_0(blocks: Bytes) -> tuple[Codes, Halves, Halves]:
    scales = _stored_half(blocks, 0)
    return _nibbles(blocks[:, 2:]), scales, scales * np.float16(-8)


def _split_q4_1(blocks: Bytes) -> tuple[Codes, Halves, Halves]:
    return _nibbles(blocks[:, 4:]), _stored_half(blocks, 0), _stored_half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    levels = _nibbles(blocks[:, 6:]) | (_bits(blocks[:, 2:6]) << 4)
    return _half(blocks, 0) * (levels.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    levels = _nibbles(blocks[:, 8:]) | (_bits(blocks[:, 4:8]) << 4)
    return _half(blocks, 0) * levels + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8)


def _split_q8_0(blocks: Bytes) -> tuple[Codes, Halves, Halves]:
    scales = _stored_half(blocks, 0)
    return blocks[:, 2:].view(np.int8), scales, np.zeros_like(scales)


def _k_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight 6-bit scales and eight 6-bit minimums out of 12 bytes, each u8[blocks, 8].

    Bytes 0 to 3 hold scales 0 to 3, bytes 4 to 7 minimums 0 to 3 (low 6 bits each). Bytes 8 to 11
    hold the low nibbles of scales (low) and minimums (high) 4 to 7, whose top 2 bits are the top 2
    bits of bytes 0 to 3 and 4 to 7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((first & 63, (third & 15) | ((first >> 6) << 4)), axis=1)
    minimums = np.concatenate((second & 63, (third >> 4) | ((second >> 6) << 4)), axis=1)
    return scales, minimums


def _k_levels(packed: Bytes) -> Bytes:
    """Nibbles in groups of 32: u8[blocks, 128] to u8[blocks, 8, 32]."""
    groups = packed.reshape(-1, 4, 1, 32)
    return np.concatenate((groups & 15, groups >> 4), axis=2).reshape(-1, 8, 32)


def _k_values(blocks: Bytes, levels: Bytes) -> Floats:
    """Scale and shift u8[blocks, 8, 32] levels by the header that Q4_K and Q5_K share."""
    scales, minimums = _k_scales(blocks[:, 4:16])
    scale = (_half(blocks, 0) * scales)[:, :, None]
    shift = (_half(blocks, 2) * minimums)[:, :, None]
    return (scale * levels - shift).reshape(-1, 256)


def _q4_k(blocks: Bytes) -> Floats:
    return _k_values(blocks, _k_levels(blocks[:, 16:144]))


def _q5_k(blocks: Bytes) -> Floats:
    # Bit g of byte i is the fifth bit of element i of group g.
    high = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little").swapaxes(1, 2)
    return _k_values(blocks, _k_levels(blocks[:, 48:176]) | (high << np.uint8(4)))


def _q6_k(blocks: Bytes) -> Floats:
    low = blocks[:, 0:128].reshape(-1, 2, 1, 64)
    low = np.concatenate((low & 15, low >> 4), axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    levels = (low | (high << np.uint8(4))).astype(np.float32).reshape(-1, 16, 16) - 32
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return (scale[:, :, None] * levels).reshape(-1, 256)


# Keys are GGML's numbers of the types.
BLOCK_FORMATS: dict[int, BlockFormat] = {
    0: BlockFormat("F32", 1, 4, _f32),
    1: BlockFormat("F16", 1, 2, _f16),
    2: BlockFormat("Q4_0", 32, 18, _q4_0, 4, _split_q4_0),
    3: BlockFormat("Q4_1", 32, 20, _q4_1, 4, _split_q4_1),
    6: BlockFormat("Q5_0", 32, 22, _q5_0),
    7: BlockFormat("Q5_1", 32, 24, _q5_1),
    8: BlockFormat("Q8_0", 32, 34, _q8_0, 8, _split_q8_0),
    12: BlockFormat("Q4_K", 256, 144, _q4_k),
    13: BlockFormat("Q5_K", 256, 176, _q5_k),
    14: BlockFormat("Q6_K", 256, 210, _q6_k),
    30: BlockFormat("BF16", 1, 2, _bf16),
}
