"""The bits of the attention depend on nothing but the sequence, whichever kernel computes them.

All tests compare bits with one prefill of the whole sequence.
"""

from dataclasses import replace

import numpy as np
import pytest

from attention_scene import (
    KV_CACHE_DTYPES,
    Cache,
    Chunk,
    random_context,
    shuffled_blocks,
)

LENGTH = 200  # two KV tiles, four query tiles
WHOLE = Cache(num_tokens=208, num_seqs=24)
# Query heads and kv heads of each group size.
HEADS = {1: (2, 2), 2: (4, 2), 3: (9, 3), 4: (4, 1), 7: (7, 1)}


def context_and_rows(kernel, group_size, dtype, head_dim=64):
    """A sequence with its table, and the rows of one prefill of all of it."""
    heads, kv_heads = HEADS[group_size]
    context = random_context(group_size, LENGTH, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    blocks = shuffled_blocks(1, [13], WHOLE.num_blocks)[0]
    (rows,), _ = replace(WHOLE, kernel=kernel, dtype=dtype).run([Chunk(context, 0, LENGTH, blocks)])
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
def test_a_decode_gives_the_bits_of_the_prefill(dtype, kernel):
    context, blocks, rows = context_and_rows(kernel, 3, dtype)
    cache = Cache(kernel=kernel, num_tokens=40, num_seqs=40, dtype=dtype)
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
def test_a_prefill_in_chunks_gives_the_bits_of_the_whole(group_size, dtype, cut, kernel):
    context, blocks, rows = context_and_rows(kernel, group_size, dtype)
    ends = np.cumsum(cut)
    # All chunks in one step, as if they were different sequences that share their blocks.
    chunks = [
        Chunk(context, int(end) - size, int(end), blocks)
        for end, size in zip(ends, cut, strict=True)
    ]
    results, _ = replace(WHOLE, kernel=kernel, dtype=dtype).run(chunks)
    np.testing.assert_array_equal(np.concatenate(results), rows)


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
@pytest.mark.parametrize("num_seqs", [9, 64])
def test_neighbours_and_buckets_do_not_change_a_decode(num_seqs, dtype, kernel):
    context, blocks, rows = context_and_rows(kernel, 3, dtype)
    cache = Cache(kernel=kernel, num_tokens=num_seqs, num_seqs=num_seqs, dtype=dtype)
    decodes = [c._replace(start=c.end - 1) for c in strangers(context, min(num_seqs - 1, 24))]
    for end in (1, 128, 129, LENGTH):
        chunk = Chunk(context, end - 1, end, blocks)
        (alone,), _ = cache.run([chunk], decode_only=True)
        (*_, crowded), _ = cache.run([*decodes, chunk], decode_only=True)
        np.testing.assert_array_equal(alone[0], rows[end - 1])
        np.testing.assert_array_equal(crowded[0], rows[end - 1])


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
@pytest.mark.parametrize("num_tokens", [250, 512])
def test_neighbours_and_buckets_do_not_change_a_prefill(num_tokens, dtype, kernel):
    context, blocks, rows = context_and_rows(kernel, 3, dtype)
    cache = Cache(kernel=kernel, num_tokens=num_tokens, num_seqs=20, dtype=dtype)
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
def test_heads_of_any_width_keep_their_bits(head_dim, dtype, kernel):
    context, blocks, rows = context_and_rows(kernel, 2, dtype, head_dim)
    spans = [(0, 1), (1, 2), (2, 130), (130, 131), (131, 190), (190, LENGTH)]
    chunks = [Chunk(context, start, end, blocks) for start, end in spans]
    results, _ = replace(WHOLE, kernel=kernel, dtype=dtype).run(chunks)
    np.testing.assert_array_equal(np.concatenate(results), rows)


def test_tables_wider_than_the_sequence_do_not_change_it(kernel):
    context, blocks, rows = context_and_rows(kernel, 3, "float32")
    wide = Cache(kernel=kernel, num_tokens=208, num_seqs=24, max_blocks=23)
    (result,), _ = wide.run([Chunk(context, 0, LENGTH, blocks)])
    np.testing.assert_array_equal(result, rows)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("block_size", [8, 128])
def test_the_block_size_does_not_change_a_bit(block_size, dtype, kernel):
    if kernel == "native" and dtype == "int8":
        pytest.skip("AMX sums pairs of bfloat16 block by block, and a server has one block size")
    context, _, rows = context_and_rows(kernel, 3, dtype)
    cache = replace(
        WHOLE, kernel=kernel, dtype=dtype, block_size=block_size, max_blocks=256 // block_size
    )
    blocks = shuffled_blocks(2, [-(-LENGTH // block_size)], cache.num_blocks)[0]
    (result,), _ = cache.run([Chunk(context, 0, LENGTH, blocks)])
    np.testing.assert_array_equal(result, rows)
