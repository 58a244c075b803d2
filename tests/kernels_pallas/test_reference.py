"""What holds for the XLA implementation: its layout, and its bits.

The output for a token must not depend on anything but its own sequence. All tests of that compare
bits with one prefill of the whole sequence.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from attention_scene import Cache, Chunk, random_context, shuffled_blocks
from kernels_pallas.reference import kv_cache_shape, write_kv

LENGTH = 200  # two KV tiles, four query tiles
WHOLE = Cache(num_tokens=208, num_seqs=24)
# Query heads and kv heads of each group size.
HEADS = {1: (2, 2), 2: (4, 2), 3: (9, 3), 4: (4, 1), 7: (7, 1)}
DTYPES = ["float32", "bfloat16"]


def context_and_rows(group_size, dtype, head_dim=64):
    """A sequence with its table, and the rows of one prefill of all of it."""
    heads, kv_heads = HEADS[group_size]
    context = random_context(
        group_size, LENGTH, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype
    )
    blocks = shuffled_blocks(1, [13], WHOLE.num_blocks)[0]
    (rows,), _ = WHOLE.run([Chunk(context, 0, LENGTH, blocks)])
    return context, blocks, rows


def strangers(context, count, first_seed=50):
    """Decodes and prefills of other sequences, in blocks that shuffled_blocks(1, [13]) leaves."""
    heads, kv_heads, head_dim = context.q.shape[1], *context.k.shape[1:]
    free = shuffled_blocks(1, [13] + [2] * count, WHOLE.num_blocks)[1:]
    chunks = []
    for index, blocks in enumerate(free):
        end = 3 + 5 * index % 30
        other = random_context(
            first_seed + index,
            end,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=context.k.dtype.name,
        )
        chunks.append(Chunk(other, end - 1 if index % 2 else 0, end, blocks))
    return chunks


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decode_gives_the_bits_of_the_prefill(dtype):
    context, blocks, rows = context_and_rows(3, dtype)
    cache = Cache(num_tokens=40, num_seqs=40)
    for first in range(0, LENGTH, 40):
        ends = range(first + 1, first + 41)
        decoded, _ = cache.run(
            [Chunk(context, end - 1, end, blocks) for end in ends], decode_only=True
        )
        np.testing.assert_array_equal(np.concatenate(decoded), rows[first : first + 40])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", HEADS)
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
    results, _ = WHOLE.run(chunks)
    np.testing.assert_array_equal(np.concatenate(results), rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_seqs", [9, 64])
def test_neighbours_and_buckets_do_not_change_a_decode(num_seqs, dtype):
    context, blocks, rows = context_and_rows(3, dtype)
    cache = Cache(num_tokens=num_seqs, num_seqs=num_seqs)
    decodes = [c._replace(start=c.end - 1) for c in strangers(context, min(num_seqs - 1, 24))]
    for end in (1, 128, 129, LENGTH):
        chunk = Chunk(context, end - 1, end, blocks)
        (alone,), _ = cache.run([chunk], decode_only=True)
        (*_, crowded), _ = cache.run([*decodes, chunk], decode_only=True)
        np.testing.assert_array_equal(alone[0], rows[end - 1])
        np.testing.assert_array_equal(crowded[0], rows[end - 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [250, 512])
def test_neighbours_and_buckets_do_not_change_a_prefill(num_tokens, dtype):
    context, blocks, rows = context_and_rows(3, dtype)
    cache = Cache(num_tokens=num_tokens, num_seqs=20)
    crowd = strangers(context, 5)
    for start in (LENGTH - 1, LENGTH - 2, 77, 0):
        (*_, result), _ = cache.run([*crowd, Chunk(context, start, LENGTH, blocks)])
        np.testing.assert_array_equal(result, rows[start:])


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(16, "float32"), (16, "bfloat16"), (80, "float32"), (96, "float32"), (128, "bfloat16")],
)
def test_heads_of_any_width_keep_their_bits(head_dim, dtype):
    context, blocks, rows = context_and_rows(2, dtype, head_dim)
    spans = [(0, 1), (1, 2), (2, 130), (130, 131), (131, 190), (190, LENGTH)]
    results, _ = WHOLE.run([Chunk(context, start, end, blocks) for start, end in spans])
    np.testing.assert_array_equal(np.concatenate(results), rows)


def test_tables_wider_than_the_sequence_do_not_change_it():
    context, blocks, rows = context_and_rows(3, "float32")
    wide = Cache(num_tokens=208, num_seqs=24, max_blocks=23)
    (result,), _ = wide.run([Chunk(context, 0, LENGTH, blocks)])
    np.testing.assert_array_equal(result, rows)


@pytest.mark.parametrize("block_size", [8, 128])
def test_the_block_size_does_not_change_a_bit(block_size):
    context, _, rows = context_and_rows(3, "float32")
    cache = Cache(num_tokens=208, num_seqs=24, block_size=block_size, max_blocks=256 // block_size)
    blocks = shuffled_blocks(2, [-(-LENGTH // block_size)], cache.num_blocks)[0]
    (result,), _ = cache.run([Chunk(context, 0, LENGTH, blocks)])
    np.testing.assert_array_equal(result, rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 16])
def test_keys_and_values_are_stored_bit_by_bit_and_nothing_else_changes(head_dim, dtype):
    """Layout by hand: row `first_block + block`; K then V; head; offset; padded head."""
    rng = np.random.default_rng(0)
    shape = kv_cache_shape(
        num_layers=2, num_blocks=5, block_size=8, num_kv_heads=3, head_dim=head_dim
    )
    assert shape == (10, 2, 3, 8, 64)
    before = rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))
    k = rng.standard_normal((6, 3, head_dim), np.float32)
    v = rng.standard_normal((6, 3, head_dim), np.float32)
    # Blocks 3 and 1 at offsets 7, 0, 1 and 4; then two tokens of padding.
    slots = np.array([31, 8, 9, 28, 0, 0], np.int32)
    after = np.asarray(write_kv(jnp.asarray(before), k, v, slots, first_block=jnp.int32(5)))
    expected = before.copy()
    for token, (block, offset) in enumerate([(3, 7), (1, 0), (1, 1), (3, 4)]):
        expected[5 + block, 0, :, offset, :head_dim] = k[token].astype(before.dtype)
        expected[5 + block, 1, :, offset, :head_dim] = v[token].astype(before.dtype)
        expected[5 + block, :, :, offset, head_dim:] = 0
    expected[5] = after[5]  # the layer's reserved block takes the padding
    np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("block_size", [0, 3, 48, 256])
def test_blocks_that_do_not_tile_the_context_are_refused(block_size):
    with pytest.raises(ValueError, match=f"block_size {block_size} must divide 128"):
        kv_cache_shape(
            num_layers=1, num_blocks=2, block_size=block_size, num_kv_heads=1, head_dim=64
        )
