"""Whether a compiled kernel gives right answers, in a process that it may crash.

`python -m kernels_pallas.self_test LIBRARY` prints the instructions that it uses, or says what is
wrong and ends with `native_build.WRONG_ANSWER`. The expected values are plain NumPy; a few
sequences with all that differs: lengths, chunks, blocks in disorder, padding, and what must not be
seen.
"""

import sys
from functools import partial
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kernels_pallas import int8, native
from kernels_pallas.group_codes import CodeBits, GroupCodes, pack_codes, packed_codes_shape
from kernels_pallas.kernel_names import AttentionKernel
from kernels_pallas.kv_cache import KVCache, KVCacheDtype
from kernels_pallas.layer_self_test import find_layer_fault, plain_attention
from kernels_pallas.native_build import BF16_INSTRUCTIONS, CODE_INSTRUCTIONS, WRONG_ANSWER
from kernels_pallas.projection import (
    pack,
    packed_shape,
    pick_largest,
    project,
    project_int8,
)
from kernels_pallas.ragged_paged_attention import (
    new_kv_cache,
    ragged_paged_attention,
    write_kv,
)
from kernels_pallas.work_plan import (
    DECODE_SPLIT_FIELDS,
    PREFILL_TILE_FIELDS,
    AttentionBatch,
    max_decode_splits,
    max_prefill_tiles,
    plan_decode_splits,
    plan_prefill_tiles,
)

__all__ = ["SOFT_CAP", "WINDOW", "find_fault"]

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 6, 2, 64, 16, 64
# (query tokens, tokens in all) of each sequence.
SPANS = ((1, 1), (1, 140), (1, 300), (5, 5), (33, 170))
NUM_TOKENS = 48
# Of the tests that are not plain: the window begins inside of chunks and of tiles.
WINDOW, SOFT_CAP = 100, 4.0
# Of outputs around 1. Products in bfloat16 round queries and weights by 2^-9.
TOLERANCES = {"float32": 1e-5, "float16": 1e-5}
BF16_TOLERANCE = 3e-2
# Of sums of products of numbers around 1, which are exact or integers, in f32.
PROJECTION_TOLERANCE = 1e-4

Floats = NDArray[np.float32]


def find_fault(
    dtype: KVCacheDtype,
    *,
    kernel: AttentionKernel = "native",
    block_size: int = BLOCK_SIZE,
    head_dim: int = HEAD_DIM,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> str | None:
    """Write and attend once, with a cache of that dtype; return what is wrong with the result."""
    rng = np.random.default_rng(0)
    lens = np.array([*(length for _, length in SPANS), 0], np.int32)
    num_blocks = max(NUM_BLOCKS, 1024 // block_size)
    tables = np.zeros((len(lens), -(-lens.max() // block_size) + 1), np.int32)
    free = rng.permutation(np.arange(1, num_blocks)).tolist()
    for seq, (_, length) in enumerate(SPANS):
        for block in range(-(-length // block_size)):
            tables[seq, block] = free.pop()
    cache = new_kv_cache(
        num_layers=2,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=KV_HEADS,
        head_dim=head_dim,
        dtype=dtype,
        kernel=kernel,
    )
    poison = 3e4 if cache.data.dtype.itemsize > 1 else 0x7F
    cache = KVCache(
        jnp.full_like(cache.data, poison),
        None if cache.scales is None else jnp.full_like(cache.scales, jnp.nan),
        cache.dtype,
        cache.kernel,
    )
    first_block = jnp.int32(num_blocks)
    # Functions of their own, so that nothing that was traced before is used.
    write = jax.jit(partial(write_kv), donate_argnums=0)
    attend = jax.jit(
        partial(
            ragged_paged_attention,
            num_kv_heads=KV_HEADS,
            scale=head_dim**-0.5,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
    )
    longest = max(length for _, length in SPANS)
    queries = np.full((NUM_TOKENS, HEADS, head_dim), 7, np.float32)
    truth: list[Floats] = []
    start = 0
    for seq, (count, length) in enumerate(SPANS):
        q = rng.standard_normal((length, HEADS, head_dim), np.float32)
        k, v = rng.standard_normal((2, longest, KV_HEADS, head_dim), np.float32)
        positions = np.arange(longest)
        slots = tables[seq, positions // block_size] * block_size + positions % block_size
        slots = np.where(positions < length, slots, 0).astype(np.int32)
        cache = write(cache, k, v, slots, first_block=first_block)
        queries[start : start + count] = q[-count:]
        start += count
        # Over what a cache of the dtype remembers.
        k, v = _stored(k[:length], dtype), _stored(v[:length], dtype)
        attended = plain_attention(q, k, v, sliding_window=sliding_window, soft_cap=soft_cap)
        truth.append(attended[-count:])
    starts = np.cumsum([0, *(count for count, _ in SPANS), 0]).astype(np.int32)
    num_decodes = sum(count == 1 for count, _ in SPANS)
    tiles = np.zeros((max_prefill_tiles(NUM_TOKENS, len(lens)), PREFILL_TILE_FIELDS), np.int32)
    splits = np.zeros((max_decode_splits(len(lens)), DECODE_SPLIT_FIELDS), np.int32)
    split_starts = np.zeros(len(lens) + 1, np.int32)
    plan_decode_splits(lens, num_decodes, splits, split_starts)
    window_splits, window_starts = np.zeros_like(splits), np.zeros_like(split_starts)
    plan_decode_splits(
        lens, num_decodes, window_splits, window_starts, sliding_window=sliding_window
    )
    arrays = {
        "slot_mapping": np.zeros(NUM_TOKENS, np.int32),
        "query_start_loc": starts,
        "seq_lens": lens,
        "block_tables": tables,
        "num_decodes": num_decodes,
        "prefill_tiles": tiles,
        "num_prefill_tiles": plan_prefill_tiles(starts[:-1], lens[:-1], num_decodes, tiles),
        "decode_splits": splits,
        "split_starts": split_starts,
        "window_splits": window_splits,
        "window_split_starts": window_starts,
    }
    batch = AttentionBatch(**{name: jnp.asarray(x, jnp.int32) for name, x in arrays.items()})
    out = np.asarray(attend(queries, cache, batch, first_block=first_block))
    if not np.isfinite(out).all():
        return f"{dtype}: something that is not finite"
    error = float(np.abs(out[:start] - np.concatenate(truth)).max())
    # On GPUs, float16 is multiplied as float16.
    if error > (TOLERANCES.get(dtype, BF16_TOLERANCE) if kernel == "native" else BF16_TOLERANCE):
        return f"{dtype}: wrong by {error:.2g}"
    return None


def _stored(x: Floats, dtype: KVCacheDtype) -> Floats:
    if dtype == "int8":
        scale = (np.abs(x).max(-1, keepdims=True) / np.float32(127)).astype(ml_dtypes.bfloat16)
        scale = scale.astype(np.float32)
        quantized: Floats = np.rint(x / scale) * scale
        return quantized
    name = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(dtype, dtype)
    return x.astype(np.dtype(name)).astype(np.float32)


def find_projection_fault() -> str | None:
    """Multiply packed weights once with some tokens; return what is wrong with the result."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((NUM_TOKENS + 1, 96)).astype(ml_dtypes.bfloat16)
    w = rng.standard_normal((160, 96)).astype(ml_dtypes.bfloat16)
    packed = np.empty(packed_shape(*w.shape), w.dtype)
    pack(w, packed[0])
    out = np.asarray(jax.jit(project)(x, packed))
    error = float(np.abs(out - x.astype(np.float32) @ w.astype(np.float32).T).max())
    # Not at most, so that what is not a number is a fault as well.
    if not error <= PROJECTION_TOLERANCE:
        return f"projection: wrong by {error:.2g}"
    picked = np.asarray(jax.jit(pick_largest)(x, packed, None))
    return None if (picked == out.argmax(axis=1)).all() else "projection: picks another output"


def find_code_fault(bits: CodeBits) -> str | None:
    """Whether few tokens get from codes what they get from the numbers that these stand for."""
    rng = np.random.default_rng(0)
    least = {4: 0, 8: -128}[bits]
    codes = GroupCodes(
        rng.integers(least, least + 2**bits, (96, 128)).astype({4: np.uint8, 8: np.int8}[bits]),
        *rng.standard_normal((2, 96, 4)).astype(np.float16),
    )
    numbers = codes.numbers().astype(ml_dtypes.bfloat16)
    packed = np.empty(packed_shape(*numbers.shape), numbers.dtype)
    pack(numbers, packed[0])
    packed_codes = np.empty(packed_codes_shape(*numbers.shape, bits=bits), np.uint8)
    pack_codes(codes, packed_codes[0])
    x = rng.standard_normal((NUM_TOKENS + 1, 128)).astype(np.float32)
    expected = np.asarray(jax.jit(project)(x, packed))
    for num_tokens in (1, 7):
        computed = np.asarray(jax.jit(project)(x[:num_tokens], packed, packed_codes))
        if (computed != expected[:num_tokens]).any():
            return f"codes of {bits} bits: others than the numbers for {num_tokens} tokens"
    return None


def find_int8_fault() -> str | None:
    """The same with weights of eight bits; the rows are rounded in float64."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((NUM_TOKENS + 1, 128)), rng.standard_normal((160, 128))
    numbers, scales = int8.quantize(w)
    packed = np.empty(packed_shape(*w.shape, dtype=np.int8), np.int8)
    pack(numbers, packed[0])
    out = np.asarray(jax.jit(project_int8)(x.astype(np.float32), packed, scales))
    rotated = int8.rotate(x.astype(np.float32).astype(np.float64))
    steps = np.abs(rotated).max(axis=1, keepdims=True) / 127
    expected = np.rint(rotated / steps) @ numbers.astype(np.float64).T * steps * scales
    error = float(np.abs(out - expected).max())
    if not error <= PROJECTION_TOLERANCE:
        return f"int8 projection: wrong by {error:.2g}"
    picked = np.asarray(jax.jit(pick_largest)(x.astype(np.float32), packed, scales))
    return None if (picked == out.argmax(axis=1)).all() else "int8 projection: picks another output"


def main(library: str) -> None:
    """Test a library; the exit code is WRONG_ANSWER if it has a fault."""
    jax.config.update("jax_platforms", "cpu")
    instructions = native.load(Path(library)).instructions
    found = [find_fault(dtype) for dtype in get_args(KVCacheDtype)]
    found.append(find_fault("float32", sliding_window=WINDOW, soft_cap=SOFT_CAP))
    found += [find_int8_fault(), find_layer_fault("int8", is_plain=False)]
    if instructions in BF16_INSTRUCTIONS:
        found += [find_projection_fault(), find_layer_fault("bfloat16")]
    if instructions == CODE_INSTRUCTIONS:
        found += [find_code_fault(bits) for bits in get_args(CodeBits)]
    faults = [fault for fault in found if fault is not None]
    if faults:
        sys.stderr.write("error: " + "; ".join(faults) + "\n")
        sys.exit(WRONG_ANSWER)
    sys.stdout.write(f"{instructions}\n")


if __name__ == "__main__":
    main(sys.argv[1])
