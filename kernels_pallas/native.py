"""Ragged paged attention on CPUs as a kernel of our own, in C++ behind XLA's foreign functions.

It reads the blocks in place instead of gathering them, and takes the ragged batch as it is: no
tiles of queries, no groups of decodes, no padding. `native_source` is the code, and says why a row
has the same bits whatever it is computed with; `native_build` compiles it, `choice` decides whether
it serves, and `load` must be called before a program that uses it is compiled.

Cache layout: [layers * blocks, 2, K, block_size, H'], H' = H rounded up, as the reference has it.
Inside a (block, K or V, head) the order is that of the products' right operands:

* for products in bfloat16 (bfloat16 and all eight-bit dtypes) pairs of what is summed over lie
  together: K is [H' / 2, block_size, 2], V is [block_size / 2, H', 2];
* for products in f32 (float32, float16) K is [H', block_size], V is [block_size, H'].
"""

import ctypes
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels_pallas.kv_cache import KVCache, KVCacheDtype, zeros_kv_cache
from kernels_pallas.native_build import NATIVE_BLOCK_SIZES
from kernels_pallas.native_layer import LAYERS
from kernels_pallas.native_sampling import SAMPLE
from kernels_pallas.projection import (
    INT8_PICK_LARGEST,
    INT8_PROJECT,
    PICK_LARGEST,
    PROJECT,
)
from kernels_pallas.work_plan import AttentionBatch

__all__ = [
    "HEAD_MULTIPLE",
    "NativeLibrary",
    "load",
    "new_kv_cache",
    "ragged_paged_attention",
    "write_kv",
]

WRITE_KV = "headrace_write_kv"
RAGGED_PAGED_ATTENTION = "headrace_ragged_paged_attention"

FUNCTIONS = (
    WRITE_KV,
    RAGGED_PAGED_ATTENTION,
    PROJECT,
    INT8_PROJECT,
    PICK_LARGEST,
    INT8_PICK_LARGEST,
    LAYERS,
    SAMPLE,
)

# Heads are padded with zeros to a multiple of this: the width of an AMX tile.
HEAD_MULTIPLE = 32


class NativeLibrary(NamedTuple):
    """A library that is loaded.

    Attributes:
        instructions: what its products of bfloat16 run on.
        pause: has the layers of the two steps with these serial numbers (`native_layer`), 0 for
            none, end behind the one at hand, or before the first. It holds for these two until
            others are named; a step that is over does not mind. Any thread may call it.
        serials: numbers for steps, each used once in a process, or so long ago that nobody knows.
    """

    instructions: str
    pause: Callable[[int, int], None]
    serials: Iterator[int]


@cache
def load(library: Path) -> NativeLibrary:
    """Make the functions of a compiled library known to XLA, for good; one library a process."""
    functions = ctypes.CDLL(str(library.absolute()))
    for name in FUNCTIONS:
        jax.ffi.register_ffi_target(
            name, jax.ffi.pycapsule(getattr(functions, name)), platform="cpu"
        )
    functions.headrace_instructions.restype = ctypes.c_char_p
    instructions: bytes = functions.headrace_instructions()
    functions.headrace_pause.argtypes = (ctypes.c_int32, ctypes.c_int32)
    functions.headrace_pause.restype = None
    serials = (number % (2**31 - 1) + 1 for number in count())
    return NativeLibrary(instructions.decode(), functions.headrace_pause, serials)


def new_kv_cache(
    *,
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: KVCacheDtype,
) -> KVCache:
    """Return a cache of zeros; see the module docstring."""
    if block_size not in NATIVE_BLOCK_SIZES:
        sizes = ", ".join(map(str, NATIVE_BLOCK_SIZES))
        raise ValueError(f"block_size {block_size} must be one of {sizes}")
    padded_head_dim = head_dim + -head_dim % HEAD_MULTIPLE
    return zeros_kv_cache(
        (num_layers * num_blocks, 2, num_kv_heads, block_size, padded_head_dim),
        dtype=dtype,
        kernel="native",
    )


def write_kv(
    kv_cache: KVCache,
    k_TKH: Float[Array, "T K H"],
    v_TKH: Float[Array, "T K H"],
    slot_mapping_T: Int[Array, "T"],
    *,
    first_block: Int[Array, ""],
) -> KVCache:
    """Write K and V to their slots, in place. Tokens in block 0 are padding and not written."""
    operands = [
        kv_cache.data,
        k_TKH.astype(jnp.float32),
        v_TKH.astype(jnp.float32),
        slot_mapping_T,
        first_block,
    ]
    aliases = {0: 0}
    results = [jax.ShapeDtypeStruct(kv_cache.data.shape, kv_cache.data.dtype)]
    if kv_cache.scales is not None:
        aliases[len(operands)] = 1
        operands.append(kv_cache.scales)
        results.append(jax.ShapeDtypeStruct(kv_cache.scales.shape, kv_cache.scales.dtype))
    call = jax.ffi.ffi_call(WRITE_KV, results, input_output_aliases=aliases)
    data, *scales = call(*operands, dtype=kv_cache.dtype)
    return KVCache(data, scales[0] if scales else None, kv_cache.dtype, kv_cache.kernel)


def ragged_paged_attention(
    q_TNH: Float[Array, "T N H"],
    kv_cache: KVCache,
    batch: AttentionBatch,
    *,
    first_block: Int[Array, ""],
    num_kv_heads: int,
    scale: float,
    decode_only: bool,
    sliding_window: int | None,
    soft_cap: float | None,
) -> Float[Array, "T N H"]:
    """Attend; the arguments are those of the contract, checked."""
    del num_kv_heads, decode_only  # the cache tells the first; the second changes nothing
    call = jax.ffi.ffi_call(RAGGED_PAGED_ATTENTION, jax.ShapeDtypeStruct(q_TNH.shape, jnp.float32))
    attended: Array = call(
        q_TNH.astype(jnp.float32),
        kv_cache.data,
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_tables,
        first_block,
        *([] if kv_cache.scales is None else [kv_cache.scales]),
        dtype=kv_cache.dtype,
        scale=np.float32(scale),
        # 0 for none: an attribute has no other way to say so.
        sliding_window=np.int64(sliding_window or 0),
        soft_cap=np.float32(soft_cap or 0),
    )
    return attended
