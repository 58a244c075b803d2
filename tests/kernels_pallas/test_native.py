"""What holds for the native kernel: its layout, and what it does where others need not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from attention_kernels import ready_kernel
from attention_scene import (
    KV_CACHE_DTYPES,
    Cache,
    Chunk,
    poisoned,
    quantized,
    random_context,
    shuffled_blocks,
)
from jaxengine.weights.source import cache_dir
from kernels_pallas.choice import KernelUnavailable, kernels_dir
from kernels_pallas.native import new_kv_cache, write_kv
from kernels_pallas.native_build import build_library, make_recipe

STORED = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "int8": np.int8,
}
PAIRS = ("bfloat16", "fp8_e4m3", "fp8_e5m2", "int8")
# Block and offset of each token that `written` writes.
PLACES = [(3, 7), (1, 0), (1, 1), (3, 4)]
NUM_BLOCKS, BLOCK_SIZE, KV_HEADS = 5, 8, 3


@pytest.fixture(autouse=True)
def native():
    try:
        ready_kernel("native")
    except KernelUnavailable as error:
        pytest.skip(str(error))


def two_layers(dtype, head_dim):
    return new_kv_cache(
        num_layers=2,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=KV_HEADS,
        head_dim=head_dim,
        dtype=dtype,
    )


def written(cache, k, v):
    """Write into the second layer, with two tokens of padding."""
    slots = np.array([block * BLOCK_SIZE + offset for block, offset in PLACES] + [0, 0], np.int32)
    return jax.jit(write_kv)(cache, k, v, slots, first_block=jnp.int32(NUM_BLOCKS))


def place(dtype, which, head_dim, offset, h):
    """Index of a number among those of its (block, K or V, head), by the docstring of native."""
    width = head_dim + -head_dim % 32
    if dtype in PAIRS:
        if which == 0:
            return (h // 2 * BLOCK_SIZE + offset) * 2 + h % 2
        return (offset // 2 * width + h) * 2 + offset % 2
    return h * BLOCK_SIZE + offset if which == 0 else offset * width + h


@pytest.mark.parametrize("head_dim", [64, 16, 80])
@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_keys_and_values_are_stored_where_the_layout_says_and_nothing_else_changes(dtype, head_dim):
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((6, KV_HEADS, head_dim), np.float32) for _ in "kv")
    before = poisoned(two_layers(dtype, head_dim))
    after = written(before, k, v)
    width = head_dim + -head_dim % 32
    shape = (2 * NUM_BLOCKS, 2, KV_HEADS, BLOCK_SIZE, width)
    assert after.data.shape == shape
    expected = np.asarray(before.data).view(STORED[dtype]).reshape(*shape[:3], -1).copy()
    scales = None if before.scales is None else np.asarray(before.scales).copy()
    for token, (block, offset) in enumerate(PLACES):
        for which, x in enumerate((k[token], v[token])):
            numbers = x
            if scales is not None:
                numbers, scales[NUM_BLOCKS + block, which, :, offset] = quantized(x)
            padded = np.pad(numbers, ((0, 0), (0, width - head_dim))).astype(STORED[dtype])
            for h in range(width):
                index = place(dtype, which, head_dim, offset, h)
                expected[NUM_BLOCKS + block, which, :, index] = padded[:, h]
    bits = f"u{after.data.dtype.itemsize}"
    np.testing.assert_array_equal(
        np.asarray(after.data).view(bits), expected.view(bits).reshape(shape)
    )
    if scales is not None:
        np.testing.assert_array_equal(np.asarray(after.scales).view("u2"), scales.view("u2"))


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_numbers_of_all_sizes_are_rounded_to_the_nearest(dtype):
    """The whole range of the small formats, their subnormal numbers and their ties included."""
    rng = np.random.default_rng(0)
    sizes = np.exp2(rng.integers(-26, 9, (6, KV_HEADS, 1))).astype(np.float32)
    k = (rng.integers(-64, 65, (6, KV_HEADS, 64)) / np.float32(16) * sizes).astype(np.float32)
    data = np.asarray(written(two_layers(dtype, 64), k, k).data)
    data = data.view(STORED[dtype]).reshape(2 * NUM_BLOCKS, 2, KV_HEADS, -1)
    for token, (block, offset) in enumerate(PLACES):
        for which in range(2):
            stored = np.stack(
                [
                    data[NUM_BLOCKS + block, which, :, place(dtype, which, 64, offset, h)]
                    for h in range(64)
                ],
                axis=-1,
            )
            expected = quantized(k[token])[0] if dtype == "int8" else k[token].astype(STORED[dtype])
            np.testing.assert_array_equal(stored.astype(np.float64), expected.astype(np.float64))


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_what_is_not_a_number_is_never_stored(dtype):
    k = np.full((6, KV_HEADS, 64), np.nan, np.float32)
    v = np.full_like(k, np.inf)
    cache = written(two_layers(dtype, 64), k, v)
    assert np.isfinite(np.asarray(cache.data).view(STORED[dtype]).astype(np.float32)).all()
    assert cache.scales is None or np.isfinite(np.asarray(cache.scales).astype(np.float32)).all()


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_a_sequence_in_a_block_that_held_nonsense_does_not_see_it(dtype):
    """A broken request leaves NaN behind; the next owner of its blocks fills them only in part."""
    cache = Cache(num_tokens=8, num_seqs=2, dtype=dtype, kernel="native")
    context = random_context(1, 21)
    chunk = Chunk(context, 20, 21, (4, 2))
    (clean,), _ = cache.run([chunk])
    nonsense = np.full((11, 2, 64), np.nan, np.float32)
    kv_cache = jax.jit(write_kv)(
        cache.filled([chunk]),
        nonsense,
        nonsense,
        cache.slots(chunk.blocks, 21, 32),
        first_block=jnp.int32(0),
    )
    q, batch = cache.pack([chunk])
    np.testing.assert_array_equal(cache.attend(q, kv_cache, batch)[0], clean[0])


def test_a_program_updates_a_donated_cache_in_place():
    cache = two_layers("int8", 64)
    k = jax.ShapeDtypeStruct((8, KV_HEADS, 64), jnp.float32)
    slots = jax.ShapeDtypeStruct((8,), jnp.int32)
    first = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = jax.jit(write_kv, donate_argnums=0).lower(cache, k, k, slots, first_block=first)
    text = compiled.compile().as_text()
    assert "input_output_alias" in text
    assert not re.search(r"\bcopy\(", text)


def test_a_cache_of_other_blocks_is_refused():
    with pytest.raises(ValueError, match="block_size 4 must be one of 8, 16, 32, 64, 128"):
        new_kv_cache(
            num_layers=1, num_blocks=2, block_size=4, num_kv_heads=1, head_dim=64, dtype="float32"
        )


ONE_THREAD = """
import sys
import numpy as np
from test_native import rows_of_a_large_step
np.save(sys.argv[1], rows_of_a_large_step())
"""


def rows_of_a_large_step():
    """Enough work for every thread: long decodes beside a prompt."""
    cache = Cache(
        num_tokens=128, num_seqs=8, num_blocks=512, max_blocks=64, dtype="bfloat16", kernel="native"
    )
    ready_kernel("native")
    spans = [(1, 1000), (1, 700), (1, 3), (100, 900)]
    tables = shuffled_blocks(3, [-(-length // 16) for _, length in spans], 512)
    chunks = [
        Chunk(random_context(seed, length, heads=9, kv_heads=3), length - count, length, table)
        for seed, ((count, length), table) in enumerate(zip(spans, tables, strict=True))
    ]
    return np.concatenate(cache.run(chunks)[0])


def run_in_a_process(script, *arguments, **environment):
    """Run a program that can import what the tests can; return what it prints."""
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {paths}\n{script}", *arguments]
    environment = {**os.environ, **environment}
    answer = subprocess.run(
        command, check=True, timeout=170, stdout=subprocess.PIPE, text=True, env=environment
    )
    return answer.stdout


def test_one_thread_gives_the_bits_of_many(tmp_path):
    """XLA's own threads share the work; a process that may use one processor has only one."""
    path = tmp_path / "rows.npy"
    limit = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    run_in_a_process(limit + ONE_THREAD, str(path))
    np.testing.assert_array_equal(np.load(path), rows_of_a_large_step())


# Whole pages are what the kernel alone asks for.
NO_PAGES = """
#include <malloc.h>
#include <stdlib.h>
extern "C" void* aligned_alloc(size_t alignment, size_t size) noexcept {
  return alignment == 4096 ? nullptr : memalign(alignment, size);
}
"""

OUT_OF_MEMORY = """
import jax
from test_native import rows_of_a_large_step
try:
    rows_of_a_large_step()
except jax.errors.JaxRuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD replaces the allocator")
def test_without_memory_a_step_fails_and_the_process_lives(tmp_path):
    source, library = tmp_path / "no_pages.cc", tmp_path / "no_pages.so"
    source.write_text(NO_PAGES)
    compiler = make_recipe(tmp_path).compiler[0]
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=170)
    told = run_in_a_process(OUT_OF_MEMORY, LD_PRELOAD=str(library))
    assert "there is no memory for what a step keeps" in told


@pytest.mark.parametrize(
    "defines", [("HEADRACE_NO_AMX",), ("HEADRACE_NO_AMX", "HEADRACE_NO_BF16", "HEADRACE_NO_VNNI")]
)
def test_other_instructions_give_right_answers_too(defines):
    """What this machine would run if it had less; the self-test is independent of the kernel."""
    recipe = make_recipe(kernels_dir(cache_dir()), defines=defines)
    build_library(recipe)
    command = [sys.executable, "-m", "kernels_pallas.self_test", str(recipe.library)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() not in ("", "AMX")
