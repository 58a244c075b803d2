"""What the attention kernels reach on a GPU, against what the GPU reaches at all."""

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import mosaic_gpu, triton
from kernels_pallas.gpu_choice import HEAD_DIMS
from kernels_pallas.kernel_names import AttentionKernel
from kernels_pallas.kv_cache import KVCacheDtype
from kernels_pallas.ragged_paged_attention import new_kv_cache
from kernels_pallas.tuning import Phase, mosaic_candidates, triton_candidates
from kernels_pallas.work_plan import (
    DECODE_SPLIT_FIELDS,
    PREFILL_TILE_FIELDS,
    AttentionBatch,
    max_decode_splits,
    max_prefill_tiles,
    plan_decode_splits,
    plan_prefill_tiles,
)

__all__ = ["Ceilings", "KernelSizes", "measure_ceilings", "measure_kernels", "time_launches"]

BLOCK_SIZE = 16

# Threads that compile ahead of what is measured.
COMPILERS = 4


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a copy and a product of matrices reach: bytes and floating point operations a second."""

    bytes_per_s: float
    flop_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSizes:
    """What to measure.

    Attributes:
        num_heads, num_kv_heads: of the layer.
        head_dims: of the layer; the first at all sizes, the others at the last decodes and prompt.
        decodes: (sequences, context) of decode steps.
        prompts: tokens of prompts that are computed whole.
        copied_bytes: of the copy; far more than the caches of the GPU.
        matrix_size: rows and columns of the product.
        repeats: launches that are timed together.
    """

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dims: tuple[int, ...] = (128, 64, 256)
    decodes: tuple[tuple[int, int], ...] = ((1, 8192), (8, 1024), (64, 1024), (256, 1024))
    prompts: tuple[int, ...] = (2048,)
    copied_bytes: int = 4 << 30
    matrix_size: int = 8192
    repeats: int = 20


def measure_ceilings(sizes: KernelSizes) -> Ceilings:
    """Copy and multiply as fast as XLA can."""
    data = jnp.zeros(sizes.copied_bytes // 4, jnp.float32)
    copy_s = time_launches(jax.jit(lambda x: x + 1), (data,), sizes.repeats)
    size = sizes.matrix_size
    matrix = jnp.ones((size, size), jnp.bfloat16)
    product_s = time_launches(jax.jit(lambda x: x @ x), (matrix,), sizes.repeats)
    return Ceilings(2 * data.nbytes / copy_s, 2 * size**3 / product_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """One entry of the tuning table on one batch: sequences of `queries` tokens, all alike."""

    kernel: AttentionKernel
    dtype: KVCacheDtype
    phase: Phase
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_seqs: int
    queries: int
    context: int
    config: Any


def measure_kernels(
    kernel: AttentionKernel, dtype: KVCacheDtype, sizes: KernelSizes, ceilings: Ceilings
) -> Iterator[dict[str, Any]]:
    """Measure the entries of the tuning table for one kernel; a row for each, as it is done.

    All of them with a bfloat16 cache; with another one those in use, at the first head_dim.
    """
    cases = list(_cases(kernel, dtype, sizes))
    pool = ThreadPoolExecutor(max_workers=COMPILERS)
    try:
        jobs = [(case, pool.submit(_compile, case)) for case in cases]
        for case, job in jobs:
            row = {
                "kernel": kernel,
                "kv_cache_dtype": dtype,
                "phase": case.phase,
                "head_dim": case.head_dim,
                "sequences": case.num_seqs,
                "context": case.context,
                "config": repr(case.config),
            }
            try:
                seconds, num_bytes, flop = _measure(case, job.result(), sizes.repeats)
            except Exception as error:  # a configuration that fails must not end the others
                yield {**row, "error": str(error)[:300]}
                continue
            yield {
                **row,
                "microseconds": seconds * 1e6,
                "gigabytes_per_s": num_bytes / seconds / 1e9,
                "share_of_copy": num_bytes / seconds / ceilings.bytes_per_s,
                "teraflop_per_s": flop / seconds / 1e12,
                "share_of_product": flop / seconds / ceilings.flop_per_s,
            }
    finally:
        # Whoever has seen enough waits for those at hand only.
        pool.shutdown(cancel_futures=True)


def _cases(kernel: AttentionKernel, dtype: KVCacheDtype, sizes: KernelSizes) -> Iterator[_Case]:
    is_ranked = dtype == "bfloat16"
    phases: tuple[Phase, ...] = ("decode", "prefill")
    for index, head_dim in enumerate(sizes.head_dims if is_ranked else sizes.head_dims[:1]):
        if head_dim > HEAD_DIMS[kernel]:
            continue
        for phase in phases:
            spans = (
                [(num_seqs, 1, context) for num_seqs, context in sizes.decodes]
                if phase == "decode"
                else [(1, tokens, tokens) for tokens in sizes.prompts]
            )
            configs = _candidates(kernel, phase, head_dim)
            for num_seqs, queries, context in spans if index == 0 else spans[-1:]:
                for config in configs if is_ranked else configs[:1]:
                    yield _Case(
                        kernel=kernel,
                        dtype=dtype,
                        phase=phase,
                        num_heads=sizes.num_heads,
                        num_kv_heads=sizes.num_kv_heads,
                        head_dim=head_dim,
                        num_seqs=num_seqs,
                        queries=queries,
                        context=context,
                        config=config,
                    )


def _candidates(kernel: AttentionKernel, phase: Phase, head_dim: int) -> Any:
    if kernel == "triton":
        return triton_candidates(phase, head_dim)
    return mosaic_candidates(phase, head_dim)


def _compile(case: _Case) -> Callable[..., Any]:
    module: Any = triton if case.kernel == "triton" else mosaic_gpu
    decode = _candidates(case.kernel, "decode", case.head_dim)[0]
    attend = partial(
        module.attend,
        first_block=jnp.int32(0),
        num_kv_heads=case.num_kv_heads,
        scale=case.head_dim**-0.5,
        decode=case.config if case.phase == "decode" else decode,
        prefill=case.config if case.phase == "prefill" else None,
    )
    compiled: Callable[..., Any] = (
        jax.jit(attend).lower(*jax.eval_shape(partial(_arguments, case))).compile()
    )
    return compiled


def _measure(case: _Case, attend: Callable[..., Any], repeats: int) -> tuple[float, float, float]:
    """Return seconds of a launch, bytes of K and V that it must read, and its operations."""
    q, cache, batch = _arguments(case)
    seconds = time_launches(attend, (q, cache, batch), repeats)
    num_blocks = case.num_seqs * math.ceil(case.context / BLOCK_SIZE)
    cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    pairs = case.context if case.phase == "decode" else case.context * (case.context + 1) / 2
    return (
        seconds,
        cache_bytes * num_blocks / (num_blocks + 1),  # without the reserved one
        4 * case.num_seqs * pairs * case.num_heads * case.head_dim,
    )


def _arguments(case: _Case) -> tuple[Any, Any, AttentionBatch]:
    """Return queries, cache and batch."""
    batch, num_blocks = _batch(case.num_seqs, case.queries, case.context)
    cache = new_kv_cache(
        num_layers=1,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        dtype=case.dtype,
        kernel=case.kernel,
    )
    num_tokens = case.num_seqs * case.queries
    return jnp.ones((num_tokens, case.num_heads, case.head_dim), jnp.bfloat16), cache, batch


def _batch(num_seqs: int, queries: int, context: int) -> tuple[AttentionBatch, int]:
    """Return sequences of one length, whose blocks lie in disorder, and the blocks in all."""
    per_seq = math.ceil(context / BLOCK_SIZE)
    num_blocks = num_seqs * per_seq + 1
    order = np.random.default_rng(0).permutation(np.arange(1, num_blocks))
    lens = np.full(num_seqs, context, np.int32)
    starts = np.arange(num_seqs + 1, dtype=np.int32) * queries
    num_decodes = num_seqs if queries == 1 else 0
    max_tiles = max_prefill_tiles(num_seqs * queries, num_seqs)
    tiles = np.zeros((max_tiles, PREFILL_TILE_FIELDS), np.int32)
    splits = np.zeros((max_decode_splits(num_seqs), DECODE_SPLIT_FIELDS), np.int32)
    split_starts = np.zeros(num_seqs + 1, np.int32)
    plan_decode_splits(lens, num_decodes, splits, split_starts)
    arrays = {
        "slot_mapping": np.zeros(num_seqs * queries),
        "query_start_loc": starts,
        "seq_lens": lens,
        "block_tables": order.reshape(num_seqs, per_seq),
        "num_decodes": num_decodes,
        "num_prefill_tiles": plan_prefill_tiles(starts, lens, num_decodes, tiles),
        "prefill_tiles": tiles,
        "decode_splits": splits,
        "split_starts": split_starts,
    }
    batch = AttentionBatch(**{name: jnp.asarray(x, jnp.int32) for name, x in arrays.items()})
    return batch, num_blocks


def time_launches(function: Callable[..., Any], arguments: tuple[Any, ...], repeats: int) -> float:
    """Return the time of one call of many that are launched together."""
    result = jax.block_until_ready(function(*arguments))
    start_s = time.perf_counter()
    for _ in range(repeats):
        result = function(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - start_s) / repeats
