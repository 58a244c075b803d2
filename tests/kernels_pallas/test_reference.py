"""What holds for the XLA implementation: its layout, and its bits.

The output for a token must not depend on anything but its own sequence. All tests of that compare
bits with one prefill of the whole sequence.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from attention_scene import (
    KV_CACHE_DTYPES,
    Cache,
    Chunk,
    quantized,
    random_context,
    shuffled_blocks,
)
from kernels_pallas.kv_cache import KVCache
from kernels_pallas.reference import new_kv_cache, write_kv

LENGTH = 200  # two KV tiles, four query tiles
WHOLE = Cache(num_tokens=208, num_seqs=24)
# Query heads and kv heads of each group size.
HEADS = {1: (2, 2), 2: (4, 2), 3: (9, 3), 4: (4, 1), 7: (7, 1)}


def context_and_rows(group_size, dtype, head_dim=64):
    """A sequence with its table, and the rows of one prefill of all of it."""
    heads, kv_heads = HEADS[group_size]
    context = random_context(group_size, LENGTH, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    blocks = shuffled_blocks(1, [13], WHOLE.num_blocks)[0]
    (rows,), _ = replace(WHOLE, dtype=dtype).run([Chunk(context, 0, LENGTH, blocks)])
    return context, blocks, rows


def strangers(context, count, first_seed=50):
    """Decodes and prefills of other sequences, in blocks that shuffled_blocks(1, [13]) leaves."""
    heads, kv_heads, head_dim = context.q.shape[1], *context.k.shape[1:]
    free = shuffled_blocks(1, [13] + [2] * count, WHOLE.num_blocks)[1:]
    chunks = []
    for index, blocks in enumerate(free):
        end = 3 + 5 * index % 30
        other = random_context(
            first_seed + index, end, heads=heads, kv_heads=kv_heads, head_dim=head_dim
        )
        chunks.append(Chunk(other, end - 1 if index % 2 else 0, end, blocks))
    return chunks


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_a_decode_gives_the_bits_of_the_prefill(dtype):
    context, blocks, rows = context_and_rows(3, dtype)
    cache = Cache(num_tokens=40, num_seqs=40, dtype=dtype)
    for first in range(0, LENGTH, 40):
        ends = range(first + 1, first + 41)
        decoded, _ = cache.run(
            [Chunk(context, end - 1, end, blocks) for end in ends], decode_only=True
        )
        np.testing.assert_array_equal(np.concatenate(decoded), rows[first : first + 40])


@pytest.mark.parametrize(
    ("group_size", "dtype"),
    [
        *((group_size, dtype) for group_size in HEADS for dtype in ("float32", "bfloat16")),
        *((3, dtype) for dtype in KV_CACHE_DTYPES if dtype not in ("float32", "bfloat16")),
    ],
)
@pytest.mark.parametrize(
    "cut",
    [[1] * 20 + [180], [7, 1, 1, 55, 136], [64, 64, 64, 8], [63, 65, 72], [2] * 20 + [159, 1]],
    ids=str,
)
def test_a_prefill_in_chunks_gives_the_bits_of_the_whole(group_size, dtype, cut):
    context, blocks, rows = context_and_rows(group_size, dtype)
    ends = np.cumsum(cut)
    # All chunks in one step, as if they were different sequences that share their blocks.
    chunks = [
        Chunk(context, int(end) - size, int(end), blocks)
        for end, size in zip(ends, cut, strict=True)
    ]
    results, _ = replace(WHOLE, dtype=dtype).run(chunks)
    np.testing.assert_array_equal(np.concatenate(results), rows)


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
@pytest.mark.parametrize("num_seqs", [9, 64])
def test_neighbours_and_buckets_do_not_change_a_decode(num_seqs, dtype):
    context, blocks, rows = context_and_rows(3, dtype)
    cache = Cache(num_tokens=num_seqs, num_seqs=num_seqs, dtype=dtype)
    decodes = [c._replace(start=c.end - 1) for c in strangers(context, min(num_seqs - 1, 24))]
    for end in (1, 128, 129, LENGTH):
        chunk = Chunk(context, end - 1, end, blocks)
        (alone,), _ = cache.run([chunk], decode_only=True)
        (*_, crowded), _ = cache.run([*decodes, chunk], decode_only=True)
        np.testing.assert_array_equal(alone[0], rows[end - 1])
        np.testing.assert_array_equal(crowded[0], rows[end - 1])


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
@pytest.mark.parametrize("num_tokens", [250, 512])
def test_neighbours_and_buckets_do_not_change_a_prefill(num_tokens, dtype):
    context, blocks, rows = context_and_rows(3, dtype)
    cache = Cache(num_tokens=num_tokens, num_seqs=20, dtype=dtype)
    crowd = strangers(context, 5)
    for start in (LENGTH - 1, LENGTH - 2, 77, 0):
        (*_, result), _ = cache.run([*crowd, Chunk(context, start, LENGTH, blocks)])
        np.testing.assert_array_equal(result, rows[start:])


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        (16, "float32"),
        (16, "bfloat16"),
        (80, "float32"),
        (96, "float32"),
        (128, "bfloat16"),
        (80, "int8"),
        (128, "int8"),
        (128, "fp8_e4m3"),
    ],
)
def test_heads_of_any_width_keep_their_bits(head_dim, dtype):
    context, blocks, rows = context_and_rows(2, dtype, head_dim)
    spans = [(0, 1), (1, 2), (2, 130), (130, 131), (131, 190), (190, LENGTH)]
    chunks = [Chunk(context, start, end, blocks) for start, end in spans]
    results, _ = replace(WHOLE, dtype=dtype).run(chunks)
    np.testing.assert_array_equal(np.concatenate(results), rows)


def test_tables_wider_than_the_sequence_do_not_change_it():
    context, blocks, rows = context_and_rows(3, "float32")
    wide = Cache(num_tokens=208, num_seqs=24, max_blocks=23)
    (result,), _ = wide.run([Chunk(context, 0, LENGTH, blocks)])
    np.testing.assert_array_equal(result, rows)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("block_size", [8, 128])
def test_the_block_size_does_not_change_a_bit(block_size, dtype):
    context, _, rows = context_and_rows(3, dtype)
    cache = replace(WHOLE, dtype=dtype, block_size=block_size, max_blocks=256 // block_size)
    blocks = shuffled_blocks(2, [-(-LENGTH // block_size)], cache.num_blocks)[0]
    (result,), _ = cache.run([Chunk(context, 0, LENGTH, blocks)])
    np.testing.assert_array_equal(result, rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 16])
def test_keys_and_values_are_stored_bit_by_bit_and_nothing_else_changes(head_dim, dtype):
    """Layout by hand: row `first_block + block`; K then V; head; offset; padded head."""
    rng = np.random.default_rng(0)
    shape = two_layers(head_dim, dtype).data.shape
    assert shape == (10, 2, 3, 8, 64)
    before = rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))
    k, v, written = write_four_tokens(
        KVCache(jnp.asarray(before), None, dtype, "reference"), head_dim
    )
    after = np.asarray(written.data)
    expected = before.copy()
    for token, (block, offset) in enumerate(PLACES):
        expected[5 + block, 0, :, offset, :head_dim] = k[token].astype(before.dtype)
        expected[5 + block, 1, :, offset, :head_dim] = v[token].astype(before.dtype)
        expected[5 + block, :, :, offset, head_dim:] = 0
    expected[5] = after[5]  # the layer's reserved block takes the padding
    np.testing.assert_array_equal(after, expected)


def test_integers_are_stored_beside_their_scales_and_nothing_else_changes():
    before = two_layers(16, "int8")
    data, scales = np.full(before.data.shape, 99, np.int8), np.full(before.scales.shape, 99.0)
    cache = KVCache(jnp.asarray(data), jnp.asarray(scales, jnp.bfloat16), "int8", "reference")
    k, v, written = write_four_tokens(cache, 16)
    for token, (block, offset) in enumerate(PLACES):
        for which, x in enumerate((k[token], v[token])):
            place = (5 + block, which, slice(None), offset)
            steps, scales[place] = quantized(x)
            data[place] = np.pad(steps, ((0, 0), (0, 48)))
    for after, expected in [(written.data, data), (written.scales, scales)]:
        after = np.asarray(after).astype(np.float64)
        np.testing.assert_array_equal(after[:5], expected[:5])
        np.testing.assert_array_equal(after[6:], expected[6:])


@pytest.mark.parametrize(
    ("dtype", "bits"), [("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")]
)
def test_small_floats_are_stored_as_their_bytes(dtype, bits):
    k, v, written = write_four_tokens(two_layers(64, dtype), 64)
    after = np.array(written.data)
    for token, (block, offset) in enumerate(PLACES):
        both = np.stack([k[token], v[token]]).astype(bits).view(np.uint8)
        np.testing.assert_array_equal(after[5 + block, :, :, offset], both)
        after[5 + block, :, :, offset] = 0
    assert not after[:5].any()
    assert not after[6:].any()


# Block and offset of each token that write_four_tokens writes.
PLACES = [(3, 7), (1, 0), (1, 1), (3, 4)]


def two_layers(head_dim, dtype):
    return new_kv_cache(
        num_layers=2, num_blocks=5, block_size=8, num_kv_heads=3, head_dim=head_dim, dtype=dtype
    )


def write_four_tokens(cache, head_dim):
    """Write into the second layer, with two tokens of padding; return K, V and the cache."""
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((6, 3, head_dim), np.float32) for _ in "kv")
    slots = np.array([block * 8 + offset for block, offset in PLACES] + [0, 0], np.int32)
    return k, v, write_kv(cache, k, v, slots, first_block=jnp.int32(5))


@pytest.mark.parametrize("block_size", [0, 3, 48, 256])
def test_blocks_that_do_not_tile_the_context_are_refused(block_size):
    with pytest.raises(ValueError, match=f"block_size {block_size} must divide 128"):
        new_kv_cache(
            num_layers=1,
            num_blocks=2,
            block_size=block_size,
            num_kv_heads=1,
            head_dim=64,
            dtype="float32",
        )
