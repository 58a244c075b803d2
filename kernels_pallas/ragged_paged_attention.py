"""Attention over a paged KV cache for a packed batch of prefill chunks and decodes.

The contract, its checks, and the choice of implementation. An implementation owns three things
together, because they only make sense together: the layout of the KV cache, the write into it,
and the attention over it. `reference` (XLA) runs everywhere and defines what is correct, `native`
(C++) is for CPUs; `choice` says which serves. A cache is made for one of them and carries its name,
so nobody can attend over another one's layout.

Letters: T packed tokens, S sequences, M blocks per sequence, W prefill tiles, N query heads,
K kv heads, H head dim.
"""

import math
from typing import Protocol

import jax
from jaxtyping import Array, Float, Int

from kernels_pallas import native, reference
from kernels_pallas.kv_cache import AttentionKernel, KVCache, KVCacheDtype
from kernels_pallas.work_plan import AttentionBatch

__all__ = [
    "new_kv_cache",
    "ragged_paged_attention",
    "write_kv",
]


class _Implementation(Protocol):
    """What a kernel's module offers; the functions below say what each does."""

    def new_kv_cache(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: KVCacheDtype,
    ) -> KVCache: ...

    def write_kv(
        self,
        kv_cache: KVCache,
        k_TKH: Float[Array, "T K H"],
        v_TKH: Float[Array, "T K H"],
        slot_mapping_T: Int[Array, "T"],
        *,
        first_block: Int[Array, ""],
    ) -> KVCache: ...

    def ragged_paged_attention(
        self,
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
    ) -> Float[Array, "T N H"]: ...


def _implementation(kernel: AttentionKernel) -> _Implementation:
    """Return a kernel's module. What those for GPUs import takes half a second: only where used."""
    match kernel:
        case "reference":
            return reference
        case "native":
            return native
        case "triton":
            from kernels_pallas import triton

            return triton
        case "mosaic_gpu":
            from kernels_pallas import mosaic_gpu

            return mosaic_gpu


def new_kv_cache(
    *,
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: KVCacheDtype,
    kernel: AttentionKernel = "reference",
) -> KVCache:
    """Return a cache of zeros for K and V of all layers; `jax.eval_shape` tells its size.

    Layer l's block b is row `l * num_blocks + b` of its arrays, so that all layers share one
    donated cache.

    Raises:
        ValueError: a block size or a dtype that the kernel does not have.
    """
    return _implementation(kernel).new_kv_cache(
        num_layers=num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )


def write_kv(
    kv_cache: KVCache,
    k_TKH: Float[Array, "T K H"],
    v_TKH: Float[Array, "T K H"],
    slot_mapping_T: Int[Array, "T"],
    *,
    first_block: Int[Array, ""],
) -> KVCache:
    """Return the cache with K and V of the packed tokens at their slots, in place when donated.

    Args:
        kv_cache: as made by `new_kv_cache`.
        k_TKH: keys after RoPE; rounded to the dtype of the cache, or its largest number.
        v_TKH: values; likewise.
        slot_mapping_T: as in AttentionBatch.
        first_block: row of this layer's block 0.
    """
    if k_TKH.shape != v_TKH.shape:
        raise ValueError(f"k has shape {k_TKH.shape} but v has {v_TKH.shape}")
    return _implementation(kv_cache.kernel).write_kv(
        kv_cache, k_TKH, v_TKH, slot_mapping_T, first_block=first_block
    )


def ragged_paged_attention(
    q_TNH: Float[Array, "T N H"],
    kv_cache: KVCache,
    batch: AttentionBatch,
    *,
    first_block: Int[Array, ""],
    num_kv_heads: int,
    scale: float,
    decode_only: bool = False,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "T N H"]:
    """Return causal attention of every packed token over its own sequence.

    The K and V of the packed tokens must have been written before. The result for a token
    depends only on its sequence, bit by bit: not on its neighbours, on the bucket, or on how
    its prompt was cut into chunks.

    Args:
        q_TNH: queries after RoPE; padding rows may hold anything finite.
        kv_cache: as made by `new_kv_cache`.
        batch: where the tokens belong.
        first_block: row of this layer's block 0.
        num_kv_heads: K; N must be a multiple of it.
        scale: factor on the scores, usually H ** -0.5.
        decode_only: promise that every sequence has one query token; smaller program.
        sliding_window: how many positions a token sees, its own and those before; None for all.
            The batch must be planned with it.
        soft_cap: scaled scores s become soft_cap * tanh(s / soft_cap); None leaves them.

    Returns:
        Outputs in f32; padding rows are finite.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    num_tokens, num_heads, head_dim = q_TNH.shape
    num_seqs = batch.seq_lens.shape[0]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} kv heads")
    num_blocks, block_size = kv_cache.data.shape[0], kv_cache.data.shape[3]
    expected = jax.eval_shape(
        lambda: new_kv_cache(
            num_layers=1,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=kv_cache.dtype,
            kernel=kv_cache.kernel,
        )
    )
    if _arrays(kv_cache) != _arrays(expected):
        raise ValueError(
            f"the cache is {_arrays(kv_cache)}, but {num_kv_heads} kv heads of {head_dim} "
            f"in {kv_cache.dtype} need {_arrays(expected)}"
        )
    if num_tokens < num_seqs:
        raise ValueError(f"{num_tokens} packed tokens cannot hold {num_seqs} sequences")
    if batch.query_start_loc.shape != (num_seqs + 1,):
        raise ValueError(
            f"query_start_loc has shape {batch.query_start_loc.shape}, expected ({num_seqs + 1},)"
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window {sliding_window} must be at least 1")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise ValueError(f"soft_cap {soft_cap} must be a positive number")
    batch.splits(sliding_window)  # is there such a plan, whoever needs it?
    return _implementation(kv_cache.kernel).ragged_paged_attention(
        q_TNH,
        kv_cache,
        batch,
        first_block=first_block,
        num_kv_heads=num_kv_heads,
        scale=scale,
        decode_only=decode_only,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )


def _arrays(kv_cache: KVCache) -> str:
    """Return dtype and shape of each array, for comparison and for people."""
    return " and ".join(f"{x.dtype.name}{list(x.shape)}" for x in jax.tree.leaves(kv_cache))
