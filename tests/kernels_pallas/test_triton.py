"""The kernels of the Triton backend, interpreted on the CPU, against float64 numpy.

What a GPU adds, its machine code, is compiled in test_tuning.py. What only running there can show
is in `python -m bench.gpu`.
"""

import contextlib
import io
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_scene import (
    KV_CACHE_DTYPES,
    POISON,
    Cache,
    Chunk,
    Context,
    expected,
    random_context,
    shuffled_blocks,
)
from gpu_target import GPUS, layer_step, lower_for
from kernels_pallas.kv_cache import KVCache
from kernels_pallas.ragged_paged_attention import new_kv_cache
from kernels_pallas.triton import attend
from kernels_pallas.tuning import TritonConfig, triton_config

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

# Products in float16 round queries and weights by 2^-12, those in bfloat16 by 2^-9; the queries'
# error grows with the scores. f32 is not rounded.
TOLERANCES = {
    "float32": 2e-6,
    "float16": 2e-3,
    "fp8_e4m3": 2e-3,
    "fp8_e5m2": 2e-3,
    "bfloat16": 1e-2,
    "int8": 1e-2,
}

SCENE = Cache(num_tokens=256, num_seqs=8, num_blocks=256, max_blocks=64, kernel="triton")

# Decodes of one, two and several splits; prompts at the edges of tiles; chunks that begin inside.
SPANS = [(1, 1), (1, 512), (1, 513), (1, 900), (64, 64), (65, 131), (2, 40)]


def make_chunks(cache: Cache, spans: list[tuple[int, int]], **context: int) -> list[Chunk]:
    """Give each (query tokens, length) its own context and shuffled blocks."""
    counts = [-(-length // cache.block_size) for _, length in spans]
    tables = shuffled_blocks(len(spans), counts, cache.num_blocks)
    return [
        Chunk(random_context(seed, length, **context), length - queries, length, table)
        for seed, ((queries, length), table) in enumerate(zip(spans, tables, strict=True))
    ]


def check(cache: Cache, chunks: list[Chunk], *, decode_only: bool = False) -> None:
    """Compare every row with numpy; rows of padding must be finite."""
    results, padding = cache.run(chunks, decode_only=decode_only)
    for chunk, result in zip(chunks, results, strict=True):
        whole = Context(*(x[: chunk.end] for x in chunk.context))
        np.testing.assert_allclose(
            result,
            cache.expected(whole)[chunk.start :],
            rtol=0,
            atol=TOLERANCES[cache.dtype],
        )
    assert np.isfinite(padding).all()


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_decodes_and_prompts_in_one_batch(dtype):
    cache = replace(SCENE, dtype=dtype)
    check(cache, make_chunks(cache, SPANS))


@pytest.mark.parametrize("block_size", [64, 128])
def test_blocks_of_other_sizes(block_size):
    cache = replace(
        SCENE, block_size=block_size, num_blocks=2048 // block_size, max_blocks=1024 // block_size
    )
    spans = [(1, block_size - 1), (1, block_size), (1, block_size + 1), (70, 150), (1, 600)]
    check(cache, make_chunks(cache, spans))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [
        (9, 3, 64, "bfloat16"),
        (32, 1, 64, "float32"),  # more heads than the rows of the decode kernel
        (4, 2, 256, "bfloat16"),
        (4, 2, 80, "int8"),  # stored padded, as all that is no power of two
    ],
)
def test_query_heads_share_kv_heads(heads, kv_heads, head_dim, dtype):
    cache = replace(SCENE, dtype=dtype)
    spans = [(1, 1), (1, 37), (1, 600), (5, 5), (70, 150)]
    check(cache, make_chunks(cache, spans, heads=heads, kv_heads=kv_heads, head_dim=head_dim))


@pytest.mark.parametrize(
    ("window", "soft_cap", "dtype"),
    [
        (100, 3.0, "float32"),
        (600, 20.0, "bfloat16"),  # of two splits
    ],
)
def test_windows_and_soft_caps(window, soft_cap, dtype):
    cache = replace(SCENE, dtype=dtype, sliding_window=window, soft_cap=soft_cap)
    check(cache, make_chunks(cache, SPANS))


def test_what_lies_before_the_window_changes_no_bit():
    cache = replace(SCENE, dtype="bfloat16", sliding_window=600, soft_cap=20.0)
    context, blocks = random_context(1, 900), shuffled_blocks(1, [57], cache.num_blocks)[0]
    other = Context(context.q, context.k.copy(), context.v.copy())
    other.k[:280] = other.v[:280] = POISON  # position 880 sees from 281 on
    for start in (880, 899):
        (rows,), _ = cache.run([Chunk(context, start, 900, blocks)])
        (others,), _ = cache.run([Chunk(other, start, 900, blocks)])
        np.testing.assert_array_equal(rows, others)


@pytest.mark.parametrize("num_seqs", [1, 8])
def test_steps_of_decodes_only(num_seqs):
    cache = replace(SCENE, num_tokens=8)
    spans = [(1, 1 + 130 * i) for i in range(num_seqs)]
    check(cache, make_chunks(cache, spans), decode_only=True)


def test_a_batch_without_sequences_gives_zeros():
    chunk = Chunk(random_context(1, 5), 0, 5, (3,))
    q, batch = SCENE.pack([chunk])
    empty = jax.tree.map(np.zeros_like, batch)
    assert not SCENE.attend(q, SCENE.filled([chunk]), empty).any()


def test_layers_do_not_see_each_other():
    cache = replace(SCENE, num_layers=3, layer=1)
    check(cache, make_chunks(cache, [(1, 600), (30, 30)]))


def test_blocks_may_be_shared_and_named_twice():
    context = random_context(1, 32)
    twice = Context(context.q, *(np.concatenate([x[:16], x[:16]]) for x in context[1:]))
    check(SCENE, [Chunk(twice, 10, 32, (5, 5)), Chunk(twice, 31, 32, (5, 5))])


def test_scores_of_any_size_are_weighed():
    context = random_context(1, 40)
    loud = Context(context.q * 1000, context.k * 1000, context.v)  # scores of millions
    check(SCENE, [Chunk(loud, 0, 40, (1, 2, 3)), Chunk(loud, 39, 40, (1, 2, 3))])


def test_the_bits_of_a_row_depend_on_its_sequence_only():
    """Alone, among others, in another place of the packed batch."""
    cache = replace(SCENE, dtype="bfloat16")
    chunks = make_chunks(cache, [(1, 900), (1, 33), (65, 131), (3, 3), (1, 513)])
    together, _ = cache.run(chunks)
    for index in (0, 2, 4):
        (alone,), _ = cache.run([chunks[index]])
        np.testing.assert_array_equal(alone, together[index])


def test_the_bits_of_a_prompt_do_not_depend_on_its_chunks():
    cache = replace(SCENE, dtype="bfloat16")
    context, blocks = random_context(3, 200), shuffled_blocks(3, [13], cache.num_blocks)[0]
    (whole,), _ = cache.run([Chunk(context, 0, 200, blocks)])
    for start, end in [(0, 2), (2, 67), (67, 194), (194, 200)]:
        (part,), _ = cache.run([Chunk(context, start, end, blocks)])
        np.testing.assert_array_equal(part, whole[start:end])


def test_a_program_may_take_several_splits(monkeypatch):
    """With other sizes than the usual, too."""
    cache = replace(SCENE, num_tokens=8)
    chunks = make_chunks(cache, [(1, 900), (1, 700), (1, 5)])
    q, batch = cache.pack(chunks)
    kv_cache = cache.filled(chunks)
    monkeypatch.setattr("kernels_pallas.triton.NUM_PROGRAMS", 3)
    config = TritonConfig(rows=32, tile=32, num_warps=4, num_stages=2)
    out = jax.jit(partial(attend, num_kv_heads=2, scale=64**-0.5, decode=config, prefill=None))(
        q, kv_cache, batch, first_block=jnp.int32(0)
    )
    for seq, chunk in enumerate(chunks):
        np.testing.assert_allclose(
            out[seq], expected(chunk.context)[-1], rtol=0, atol=TOLERANCES["float32"]
        )


def test_other_blocks_and_heads_than_the_kernel_has_are_refused():
    sizes = {"num_layers": 1, "num_kv_heads": 2, "dtype": "bfloat16", "kernel": "triton"}
    with pytest.raises(ValueError, match="block_size 24 must be 8, 16, 32, 64 or 128"):
        new_kv_cache(num_blocks=4, block_size=24, head_dim=64, **sizes)
    with pytest.raises(ValueError, match="heads of 320 exceed the largest, 256"):
        new_kv_cache(num_blocks=4, block_size=16, head_dim=320, **sizes)


def cache_of_bytes(gib: float, dtype: str) -> KVCache:
    """Shapes of a cache of about so many GiB; blocks of 2 x 8 x 16 x 128 elements."""
    num_blocks = int(gib * 2**30) // (
        2**15 * jnp.dtype("uint8" if "8" in dtype else dtype).itemsize
    )
    return jax.eval_shape(
        lambda: new_kv_cache(
            num_layers=1,
            num_blocks=num_blocks,
            block_size=16,
            num_kv_heads=8,
            head_dim=128,
            dtype=dtype,
            kernel="triton",
        )
    )


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_caches_whose_offsets_the_backend_gets_wrong_are_refused(dtype):
    """Eight-bit arrays between 2 and 4 GiB."""
    for gib in (1.9, 2.0, 4.1):
        cache_of_bytes(gib, dtype)
    for gib in (2.1, 3.0, 4.0):
        with pytest.raises(ValueError, match="take at most 65536 blocks, or more than 131072"):
            cache_of_bytes(gib, dtype)


@pytest.mark.parametrize("gpu", list(GPUS))
@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_every_dtype_lowers_for_every_gpu(gpu, dtype):
    for options in ({}, {"sliding_window": 1000, "soft_cap": 50.0}):
        step, shapes = layer_step(cache_of_bytes(1.0, dtype), num_tokens=128, **options)
        program = lower_for(gpu, step, *shapes)
        assert program.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_large_caches_have_wide_offsets(dtype, monkeypatch):
    """The kernel as the compiler gets it: pointers into the cache, and how far they move."""
    offsets = {}
    for gib in (1.0, 9.0):
        step, shapes = layer_step(cache_of_bytes(gib, dtype))
        printed = io.StringIO()
        pallas_call = jax.experimental.pallas.pallas_call
        with contextlib.redirect_stdout(printed), monkeypatch.context() as patch:
            patch.setattr(
                "kernels_pallas.triton.pl.pallas_call",
                lambda kernel, call=pallas_call, **options: call(kernel, debug=True, **options),
            )
            jax.clear_caches()
            lower_for("h200", step, *shapes)
        width = 8 if dtype == "fp8_e4m3" else 16
        tile = triton_config("decode", 128).tile
        pattern = rf"tt\.addptr .*: tensor<{tile}x128x!tt\.ptr<[if]?b?f?{width}>>, .*x(i\d+)>"
        offsets[gib] = set(re.findall(pattern, printed.getvalue()))
    assert offsets == {1.0: {"i32"}, 9.0: {"i64"}}
