"""Attention against float64 numpy. What holds for every implementation behind the contract."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_scene import (
    KV_CACHE_DTYPES,
    Cache,
    Chunk,
    Context,
    expected,
    random_context,
    shuffled_blocks,
    stored,
)
from kernels_pallas.kv_cache import KVCache
from kernels_pallas.ragged_paged_attention import (
    new_kv_cache,
    ragged_paged_attention,
    write_kv,
)

# Against attention over what the cache remembers. Outputs are averages of values around 1. f32
# products, which float16 takes too, round each of some hundred sums by 2^-24; those in bf16 round
# the scaled queries and the weights by 2^-9, and the queries' error grows with the scores.
F32_TOLERANCE, BF16_TOLERANCE = 2e-6, 1e-2
TOLERANCES = dict.fromkeys(KV_CACHE_DTYPES, BF16_TOLERANCE) | dict.fromkeys(
    ("float32", "float16"), F32_TOLERANCE
)


def check(cache: Cache, chunks: list[Chunk], *, decode_only: bool = False) -> None:
    """Compare every row with numpy; rows of padding must be finite."""
    results, padding = cache.run(chunks, decode_only=decode_only)
    for chunk, result in zip(chunks, results, strict=True):
        whole = Context(*(x[: chunk.end] for x in chunk.context))
        np.testing.assert_allclose(
            result,
            expected(whole, cache.dtype)[chunk.start :],
            rtol=0,
            atol=TOLERANCES[cache.dtype],
        )
    assert np.isfinite(padding).all()


def make_chunks(cache: Cache, spans: list[tuple[int, int]], **context: int) -> list[Chunk]:
    """Give each (query tokens, length) its own context and shuffled blocks."""
    counts = [-(-length // cache.block_size) for _, length in spans]
    tables = shuffled_blocks(len(spans), counts, cache.num_blocks)
    return [
        Chunk(random_context(seed, length, **context), length - queries, length, table)
        for seed, ((queries, length), table) in enumerate(zip(spans, tables, strict=True))
    ]


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_lengths_at_the_edges_of_blocks_and_tiles(block_size, kernel):
    cache = Cache(
        kernel=kernel,
        num_tokens=640,
        num_seqs=16,
        block_size=block_size,
        num_blocks=4096 // block_size,
        max_blocks=256 // block_size,
    )
    lengths = sorted({1, block_size - 1, block_size, block_size + 1, 127, 128, 129, 256})
    decodes = [(1, length) for length in lengths]
    prefills = [(63, 63), (64, 64), (65, 65), (193, 193), (2, 129), (17, 256), (100, 131)]
    check(cache, make_chunks(cache, decodes + prefills))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [
        (2, 2, 64, "float32"),
        (1, 1, 128, "float32"),
        (4, 2, 128, "float32"),
        (9, 3, 64, "float32"),
        (9, 3, 64, "bfloat16"),
        (4, 1, 128, "bfloat16"),
        (16, 2, 64, "float32"),
        (16, 2, 64, "bfloat16"),
        (7, 1, 16, "float32"),  # narrower heads, and 80 wide ones, are stored padded
        (4, 2, 80, "bfloat16"),
    ],
)
def test_query_heads_share_kv_heads(heads, kv_heads, head_dim, dtype, kernel):
    cache = Cache(kernel=kernel, num_tokens=128, num_seqs=8, dtype=dtype)
    spans = [(1, 1), (1, 37), (1, 200), (5, 5), (70, 150)]
    check(cache, make_chunks(cache, spans, heads=heads, kv_heads=kv_heads, head_dim=head_dim))


@pytest.mark.parametrize(
    ("dtype", "block_size"),
    [
        *(("int8", block_size) for block_size in (8, 16, 32, 64, 128)),
        *((dtype, 16) for dtype in KV_CACHE_DTYPES if dtype != "int8"),
        *((dtype, 128) for dtype in ("bfloat16", "float16", "fp8_e4m3", "fp8_e5m2")),
    ],
)
def test_dtypes_of_the_cache_in_blocks_of_all_sizes(dtype, block_size, kernel):
    cache = Cache(
        kernel=kernel,
        num_tokens=128,
        num_seqs=8,
        dtype=dtype,
        block_size=block_size,
        num_blocks=2048 // block_size,
        max_blocks=256 // block_size,
    )
    spans = [(1, 1), (1, block_size), (1, block_size + 1), (1, 200), (3, 3), (65, 193)]
    check(cache, make_chunks(cache, spans, heads=9, kv_heads=3))


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_a_key_beyond_the_range_of_the_cache_is_as_large_as_that_allows(dtype, kernel):
    """The second key, 1e30, takes all the weight; the first two values show it."""
    context = random_context(1, 3)
    loud = context._replace(q=np.abs(context.q), k=context.k.copy())
    loud.k[1] = 1e30
    (rows,), _ = replace(MIXED, kernel=kernel, dtype=dtype).run([Chunk(loud, 2, 3, (5,))])
    np.testing.assert_allclose(
        rows[0], np.repeat(stored(context.v, dtype)[1], 2, axis=0), rtol=0, atol=BF16_TOLERANCE
    )


MIXED = Cache(num_tokens=256, num_seqs=24)


@pytest.mark.parametrize(
    "spans",
    [
        [(1, 1)],
        [(1, 256)],
        [(1, 1 + 7 * i) for i in range(24)],
        [(2, 2)],
        [(256, 256)],
        [(1, 9), (1, 100), (3, 3), (1, 77), (130, 200)],
        [(60, 60), (1, 5), (65, 65), (1, 130)],
    ],
    ids=str,
)
def test_batches_of_decodes_and_prefills(spans, kernel):
    cache = Cache(kernel=kernel, num_tokens=256, num_seqs=24, num_blocks=256)
    check(cache, make_chunks(cache, spans))


@pytest.mark.parametrize("start", [1, 15, 16, 17, 63, 64, 65, 126, 127, 128, 129, 197])
def test_chunks_may_start_anywhere(start, kernel):
    context = random_context(1, 200)
    blocks = shuffled_blocks(1, [13], 64)[0]
    check(replace(MIXED, kernel=kernel), [Chunk(context, start, 200, blocks)])


@pytest.mark.parametrize("num_seqs", [1, 3, 16, 20])
def test_steps_of_decodes_only(num_seqs, kernel):
    cache = Cache(kernel=kernel, num_tokens=20, num_seqs=20, num_blocks=256)
    check(cache, make_chunks(cache, [(1, 11 * (i + 1)) for i in range(num_seqs)]), decode_only=True)


def test_a_batch_without_sequences_gives_finite_rows(kernel):
    chunk = Chunk(random_context(1, 5), 0, 5, (3,))
    cache = replace(MIXED, kernel=kernel)
    q, batch = cache.pack([chunk])
    empty = jax.tree.map(np.zeros_like, batch)
    assert np.isfinite(cache.attend(q, cache.filled([chunk]), empty)).all()


def test_sequences_may_share_blocks_of_a_common_beginning(kernel):
    first, second = random_context(1, 60), random_context(2, 90)
    # The second shares 48 tokens, three blocks, and goes its own way after them.
    second = Context(
        second.q,
        *(np.concatenate([a[:48], b[48:]]) for a, b in zip(first[1:], second[1:], strict=True)),
    )
    chunks = [
        Chunk(first, 59, 60, (9, 4, 7, 30)),
        Chunk(second, 48, 90, (9, 4, 7, 12, 3, 22)),
        Chunk(second, 47, 48, (9, 4, 7)),
    ]
    check(replace(MIXED, kernel=kernel), chunks)


def test_a_table_may_name_the_same_block_twice(kernel):
    context = random_context(1, 32)
    twice = Context(context.q, *(np.concatenate([x[:16], x[:16]]) for x in context[1:]))
    check(
        replace(MIXED, kernel=kernel), [Chunk(twice, 10, 32, (5, 5)), Chunk(twice, 31, 32, (5, 5))]
    )


def test_layers_do_not_see_each_other(kernel):
    cache = Cache(kernel=kernel, num_tokens=128, num_seqs=8, num_layers=3, layer=1)
    check(cache, make_chunks(cache, [(1, 40), (30, 30)]))


def test_scores_of_any_size_are_weighed(kernel):
    context = random_context(1, 40)
    loud = Context(context.q * 1000, context.k * 1000, context.v)  # scores of millions
    check(
        replace(MIXED, kernel=kernel),
        [Chunk(loud, 0, 40, (1, 2, 3)), Chunk(loud, 39, 40, (1, 2, 3))],
    )


def test_equal_scores_give_the_mean_of_the_values(kernel):
    context = random_context(1, 50)
    level = Context(np.zeros_like(context.q), context.k, context.v)
    (rows,), _ = replace(MIXED, kernel=kernel).run([Chunk(level, 0, 50, (1, 2, 3, 4))])
    means = np.cumsum(context.v, axis=0) / np.arange(1, 51)[:, None, None]
    np.testing.assert_allclose(rows, np.repeat(means, 2, axis=1), rtol=0, atol=2e-6)


def test_written_tokens_are_seen_and_others_stay(kernel):
    """Write two tokens over old ones; the others of the same block keep their effect."""
    cache = Cache(kernel=kernel, num_tokens=8, num_seqs=1)
    old, new = random_context(1, 20), random_context(2, 20)
    chunk = Chunk(old, 19, 20, (6, 2))
    slots = np.array([*cache.slots(chunk.blocks, 15, 17), 0, 0], np.int32)
    kv_cache = write_kv(
        cache.filled([chunk]),
        np.pad(new.k[15:17], ((0, 2), (0, 0), (0, 0))),
        np.pad(new.v[15:17], ((0, 2), (0, 0), (0, 0))),
        slots,
        first_block=jnp.int32(0),
    )
    q, batch = cache.pack([chunk])
    out = cache.attend(q, kv_cache, batch)
    mixed = Context(
        old.q,
        *(
            np.concatenate([a[:15], b[15:17], a[17:]])
            for a, b in zip(old[1:], new[1:], strict=True)
        ),
    )
    np.testing.assert_allclose(out[0], expected(mixed)[19], rtol=0, atol=2e-6)


def small_cache(kernel, head_dim=64, dtype="float32"):
    return new_kv_cache(
        num_layers=1,
        num_blocks=4,
        block_size=16,
        num_kv_heads=2,
        head_dim=head_dim,
        dtype=dtype,
        kernel=kernel,
    )


def call(kernel, **changes):
    """A well-formed call with something changed."""
    q, batch = MIXED.pack([Chunk(random_context(1, 5), 0, 5, (3,))])
    arguments = {"q": q, "kv_cache": small_cache(kernel), "num_kv_heads": 2, "batch": batch}
    arguments |= changes
    return ragged_paged_attention(
        arguments["q"],
        arguments["kv_cache"],
        arguments["batch"],
        first_block=jnp.int32(0),
        num_kv_heads=arguments["num_kv_heads"],
        scale=1.0,
    )


def test_query_heads_that_cannot_share_are_refused(kernel):
    with pytest.raises(ValueError, match="4 query heads cannot share 3 kv heads"):
        call(kernel, num_kv_heads=3)


@pytest.mark.parametrize("head_dim", [128, 200])
def test_a_cache_of_other_heads_is_refused(head_dim, kernel):
    with pytest.raises(ValueError, match="2 kv heads of 64 in float32 need"):
        call(kernel, kv_cache=small_cache(kernel, head_dim))


def test_a_cache_that_is_not_what_its_dtype_says_is_refused(kernel):
    cache = small_cache(kernel, dtype="int8")
    with pytest.raises(
        ValueError, match=r"the cache is int8\[4, 2, 2, 16, 64\], but .* and bfloat16"
    ):
        call(kernel, kv_cache=KVCache(cache.data, None, "int8", kernel))
    with pytest.raises(ValueError, match=r"fp8_e4m3 need uint8\[4, 2, 2, 16, 64\]"):
        call(kernel, kv_cache=KVCache(cache.data, None, "fp8_e4m3", kernel))


def test_a_dtype_that_no_cache_has_is_refused(kernel):
    with pytest.raises(ValueError, match=r"no dtype 'int4', only bfloat16, .*int8"):
        small_cache(kernel, dtype="int4")


def test_more_sequences_than_tokens_are_refused(kernel):
    q, _ = replace(MIXED, kernel=kernel).pack([Chunk(random_context(1, 5), 0, 5, (3,))])
    with pytest.raises(ValueError, match="20 packed tokens cannot hold 24 sequences"):
        call(kernel, q=q[:20])


def test_query_starts_of_another_length_are_refused(kernel):
    _, batch = replace(MIXED, kernel=kernel).pack([Chunk(random_context(1, 5), 0, 5, (3,))])
    with pytest.raises(ValueError, match=r"query_start_loc has shape \(24,\), expected \(25,\)"):
        call(kernel, batch=batch._replace(query_start_loc=batch.query_start_loc[:-1]))


def test_keys_and_values_of_different_shapes_are_refused(kernel):
    with pytest.raises(ValueError, match=r"k has shape \(3, 2, 64\) but v has \(2, 2, 64\)"):
        write_kv(
            small_cache(kernel),
            jnp.zeros((3, 2, 64)),
            jnp.zeros((2, 2, 64)),
            jnp.zeros(3, jnp.int32),
            first_block=jnp.int32(0),
        )
