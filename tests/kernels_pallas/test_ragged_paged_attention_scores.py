"""Sliding windows and soft caps against float64 numpy, whichever kernel computes them."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from attention_scene import (
    POISON,
    Cache,
    Chunk,
    Context,
    random_context,
    shuffled_blocks,
)
from kernels_pallas.ragged_paged_attention import new_kv_cache, ragged_paged_attention

CACHE = Cache(num_tokens=256, num_seqs=8, num_blocks=128, max_blocks=32)
BOTH = replace(CACHE, sliding_window=100, soft_cap=4.0)
DTYPES = ("float32", "int8")
# Decodes and chunks whose windows begin at, before and after the edges of blocks and tiles.
SPANS = [(1, 1), (1, 128), (1, 257), (1, 400), (64, 64), (70, 330), (2, 131)]
# As in test_ragged_paged_attention.py.
TOLERANCES = dict.fromkeys(DTYPES, 1e-2) | {"float32": 2e-6}


def make_chunks(cache: Cache, spans: list[tuple[int, int]], **context: int) -> list[Chunk]:
    counts = [-(-length // cache.block_size) for _, length in spans]
    tables = shuffled_blocks(len(spans), counts, cache.num_blocks)
    return [
        Chunk(random_context(seed, length, **context), length - queries, length, table)
        for seed, ((queries, length), table) in enumerate(zip(spans, tables, strict=True))
    ]


def check(cache: Cache, chunks: list[Chunk], *, decode_only: bool = False) -> None:
    results, padding = cache.run(chunks, decode_only=decode_only)
    for chunk, result in zip(chunks, results, strict=True):
        np.testing.assert_allclose(
            result,
            cache.expected(chunk.context)[chunk.start :],
            rtol=0,
            atol=TOLERANCES[cache.dtype],
        )
    assert np.isfinite(padding).all()


@pytest.mark.parametrize(("window", "block_size"), [(1, 16), (128, 8)])
def test_a_token_sees_itself_and_those_before_it_in_the_window(window, block_size, kernel):
    cache = replace(
        CACHE,
        kernel=kernel,
        sliding_window=window,
        block_size=block_size,
        num_blocks=2048 // block_size,
        max_blocks=512 // block_size,
    )
    check(cache, make_chunks(cache, SPANS))


def test_scores_of_any_size_are_capped_softly(kernel):
    cache = replace(CACHE, kernel=kernel, soft_cap=20.0)
    context = random_context(1, 40)
    loud = Context(context.q * 1000, context.k * 1000, context.v)  # scores of millions
    quiet = make_chunks(cache, SPANS[:2])
    check(cache, [*quiet, Chunk(loud, 39, 40, (1, 2, 3)), Chunk(loud, 0, 40, (1, 2, 3))])


@pytest.mark.parametrize("dtype", DTYPES)
def test_windows_and_caps_in_one(dtype, kernel):
    cache = replace(BOTH, kernel=kernel, dtype=dtype)
    check(cache, make_chunks(cache, SPANS))


def test_steps_of_decodes_only_have_windows_and_caps_too(kernel):
    cache = replace(BOTH, kernel=kernel, num_tokens=8)
    check(cache, make_chunks(cache, [(1, 1 + 60 * i) for i in range(7)]), decode_only=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_before_the_window_changes_no_bit(dtype, kernel):
    cache = replace(BOTH, kernel=kernel, dtype=dtype)
    context, blocks = random_context(1, 330), shuffled_blocks(1, [21], cache.num_blocks)[0]
    other = Context(context.q, context.k.copy(), context.v.copy())
    other.k[:170] = other.v[:170] = POISON  # position 269 sees from 170 on
    for start in (269, 329):
        (rows,), _ = cache.run([Chunk(context, start, 330, blocks)])
        (others,), _ = cache.run([Chunk(other, start, 330, blocks)])
        np.testing.assert_array_equal(rows, others)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_on_nothing_but_the_sequence(dtype, kernel):
    """One prefill of it all, chunks that begin anywhere, decodes, among others."""
    cache = replace(BOTH, kernel=kernel, dtype=dtype)
    context, blocks = random_context(3, 250), shuffled_blocks(1, [16], cache.num_blocks)[0]
    (whole,), _ = cache.run([Chunk(context, 0, 250, blocks)])
    ends = np.cumsum([1, 66, 61, 2, 1, 118, 1])
    parts = [
        Chunk(context, int(start), int(end), blocks)
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]
    results, _ = cache.run(parts)
    np.testing.assert_array_equal(np.concatenate(results), whole)


def call(**options):
    q, batch = CACHE.pack([Chunk(random_context(1, 5), 0, 5, (3,))])
    cache = new_kv_cache(
        num_layers=1, num_blocks=4, block_size=16, num_kv_heads=2, head_dim=64, dtype="float32"
    )
    return ragged_paged_attention(
        q, cache, batch, first_block=jnp.int32(0), num_kv_heads=2, scale=1.0, **options
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": 0}, "sliding_window 0 must be at least 1"),
        ({"sliding_window": 5}, "the batch was planned without a sliding window"),
        ({"soft_cap": 0.0}, "soft_cap 0.0 must be a positive number"),
        ({"soft_cap": float("inf")}, "soft_cap inf must be a positive number"),
    ],
)
def test_windows_and_caps_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        call(**options)
