"""Whether a compiled kernel gives right answers, in a process that it may crash.

`python -m kernels_pallas.self_test LIBRARY` prints the instructions that it uses, or says what is
wrong and ends with 1. The expected values are plain NumPy; a few sequences with all that differs:
lengths, chunks, blocks in disorder, padding, and what must not be seen.
"""

import sys
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kernels_pallas import native
from kernels_pallas.kv_cache import KVCache, KVCacheDtype
from kernels_pallas.work_plan import AttentionBatch

__all__ = ["find_fault"]

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 6, 2, 64, 16, 64
# (query tokens, tokens in all) of each sequence.
SPANS = ((1, 1), (1, 140), (1, 300), (5, 5), (33, 170))
NUM_TOKENS = 48
# Of outputs around 1. Products in bfloat16 round queries and weights by 2^-9.
TOLERANCES = {"float32": 1e-5, "float16": 1e-5}
BF16_TOLERANCE = 3e-2

Floats = NDArray[np.float32]


def find_fault(dtype: KVCacheDtype) -> str | None:
    """Write and attend once, with a cache of that dtype; return what is wrong with the result."""
    rng = np.random.default_rng(0)
    tables = np.zeros((len(SPANS) + 1, 20), np.int32)
    free = rng.permutation(np.arange(1, NUM_BLOCKS)).tolist()
    for seq, (_, length) in enumerate(SPANS):
        for block in range(-(-length // BLOCK_SIZE)):
            tables[seq, block] = free.pop()
    cache = native.new_kv_cache(
        num_layers=2,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
    )
    poison = 3e4 if cache.data.dtype.itemsize > 1 else 0x7F
    cache = KVCache(
        jnp.full_like(cache.data, poison),
        None if cache.scales is None else jnp.full_like(cache.scales, jnp.nan),
        cache.dtype,
        cache.kernel,
    )
    first_block = jnp.int32(NUM_BLOCKS)
    write = jax.jit(native.write_kv, donate_argnums=0)
    attend = jax.jit(
        native.ragged_paged_attention, static_argnames=("num_kv_heads", "scale", "decode_only")
    )
    longest = max(length for _, length in SPANS)
    queries = np.full((NUM_TOKENS, HEADS, HEAD_DIM), 7, np.float32)
    truth: list[Floats] = []
    start = 0
    for seq, (count, length) in enumerate(SPANS):
        q = rng.standard_normal((length, HEADS, HEAD_DIM), np.float32)
        k, v = rng.standard_normal((2, longest, KV_HEADS, HEAD_DIM), np.float32)
        positions = np.arange(longest)
        slots = tables[seq, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        slots = np.where(positions < length, slots, 0).astype(np.int32)
        cache = write(cache, k, v, slots, first_block=first_block)
        queries[start : start + count] = q[-count:]
        start += count
        truth.append(_attend(q, k[:length], v[:length], dtype)[-count:])
    # What the kernel does not look at is empty.
    arrays = dict.fromkeys(AttentionBatch._fields, np.zeros(0, np.int32)) | {
        "query_start_loc": np.cumsum([0, *(count for count, _ in SPANS), 0]).astype(np.int32),
        "seq_lens": np.array([*(length for _, length in SPANS), 0], np.int32),
        "block_tables": tables,
    }
    batch = AttentionBatch(**{name: jnp.asarray(array) for name, array in arrays.items()})
    out = np.asarray(
        attend(
            queries,
            cache,
            batch,
            first_block=first_block,
            num_kv_heads=KV_HEADS,
            scale=HEAD_DIM**-0.5,
            decode_only=False,
        )
    )
    if not np.isfinite(out).all():
        return f"{dtype}: something that is not finite"
    error = float(np.abs(out[:start] - np.concatenate(truth)).max())
    if error > TOLERANCES.get(dtype, BF16_TOLERANCE):
        return f"{dtype}: wrong by {error:.2g}"
    return None


def _attend(q: Floats, k: Floats, v: Floats, dtype: KVCacheDtype) -> Floats:
    """Causal attention over what a cache of the dtype remembers."""
    k, v = (np.repeat(_stored(x, dtype), HEADS // KV_HEADS, axis=1) for x in (k, v))
    scores = np.einsum("qnh,knh->nqk", q, k) * HEAD_DIM**-0.5
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    attended: Floats = np.einsum("nqk,knh->qnh", weights, v)
    return attended


def _stored(x: Floats, dtype: KVCacheDtype) -> Floats:
    if dtype == "int8":
        scale = (np.abs(x).max(-1, keepdims=True) / np.float32(127)).astype(ml_dtypes.bfloat16)
        scale = scale.astype(np.float32)
        quantized: Floats = np.rint(x / scale) * scale
        return quantized
    name = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(dtype, dtype)
    return x.astype(np.dtype(name)).astype(np.float32)


def main(library: str) -> None:
    """Test a library; the exit code is 1 if it has a fault."""
    jax.config.update("jax_platforms", "cpu")
    instructions = native.load(Path(library))
    faults = [fault for dtype in get_args(KVCacheDtype) if (fault := find_fault(dtype))]
    if faults:
        sys.exit("error: " + "; ".join(faults))
    sys.stdout.write(f"{instructions}\n")


if __name__ == "__main__":
    main(sys.argv[1])
