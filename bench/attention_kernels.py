"""How fast each attention kernel is, one layer at a time.

    python -m bench.attention_kernels

Decodes of many lengths and chunks of prompts over contexts of many lengths, in the default model's
shape unless told otherwise. The kernels take turns, so that whatever else the machine does hits
all of them.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import get_args

import click
import jax
import jax.numpy as jnp
import numpy as np

from bench.environment import describe_environment
from bench.report import open_console, print_rows, write_json
from jaxengine.weights.source import cache_dir
from kernels_pallas import native
from kernels_pallas.choice import choose_kernel, kernels_dir
from kernels_pallas.kernel_names import AttentionKernel
from kernels_pallas.kv_cache import KVCache, KVCacheDtype
from kernels_pallas.ragged_paged_attention import (
    new_kv_cache,
    ragged_paged_attention,
    write_kv,
)
from kernels_pallas.work_plan import AttentionBatch, max_prefill_tiles, plan_prefill_tiles

__all__ = ["Case", "attention_kernels", "measure_case"]

RESULT_SCHEMA = "headrace.bench.attention_kernels/1"
KERNELS: tuple[AttentionKernel, ...] = ("native", "reference")
HEADINGS = ("sequences", "queries", "context", "kernel", "ms median/min", "CPU ms\nmin", "times")


@dataclass(frozen=True, slots=True)
class Case:
    """A step: sequences with so many query tokens each, after so much context.

    Decodes, which have one query token, have lengths spread over the upper half of the context.
    """

    num_seqs: int
    num_queries: int
    context: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads and blocks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Timing:
    """What one kernel took for a case, in milliseconds; `cpu_ms` counts all threads."""

    kernel: AttentionKernel
    median_ms: float
    min_ms: float
    cpu_ms: float


CASES = (
    *(Case(num_seqs, 1, context) for num_seqs, context in ((1, 256), (8, 256), (32, 256))),
    *(Case(num_seqs, 1, context) for num_seqs, context in ((64, 256), (32, 1024), (4, 4096))),
    *(Case(1, queries, context) for queries in (64, 512) for context in (0, 2000, 8000)),
)


def measure_case(
    case: Case,
    shape: Shape,
    dtype: KVCacheDtype,
    kernels: Sequence[AttentionKernel],
    *,
    repeats: int,
    limit_s: float,
) -> list[Timing]:
    """Time the kernels in turns.

    Args:
        case: the step.
        shape: of heads and blocks.
        dtype: of the KV cache.
        kernels: ready to run.
        repeats: turns, at most.
        limit_s: after which no new turn begins, once there were three.
    """
    calls = {kernel: _prepare(case, shape, dtype, kernel) for kernel in kernels}
    times: dict[AttentionKernel, list[tuple[float, float]]] = {kernel: [] for kernel in kernels}
    start_s = time.perf_counter()
    for turn in range(repeats):
        if turn >= 3 and time.perf_counter() - start_s > limit_s:
            break
        for kernel, call in calls.items():
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            call()
            times[kernel].append((time.perf_counter() - wall_s, time.process_time() - cpu_s))
    return [
        Timing(
            kernel,
            median(wall_s for wall_s, _ in measured) * 1000,
            min(wall_s for wall_s, _ in measured) * 1000,
            min(cpu_s for _, cpu_s in measured) * 1000,
        )
        for kernel, measured in times.items()
    ]


def _prepare(
    case: Case, shape: Shape, dtype: KVCacheDtype, kernel: AttentionKernel
) -> Callable[[], object]:
    """Fill a cache and compile; return a call of the attention that waits for its end."""
    rng = np.random.default_rng(0)
    num_seqs, num_queries = case.num_seqs, case.num_queries
    longest = case.context if num_queries == 1 else case.context + num_queries
    lens = np.full(num_seqs, longest, np.int32)
    if num_queries == 1:
        lens = np.linspace(longest // 2 + 1, longest, num_seqs).astype(np.int32)
    blocks_per_seq = -(-longest // shape.block_size)
    num_blocks = num_seqs * blocks_per_seq + 1
    tables = rng.permutation(np.arange(1, num_blocks)).astype(np.int32)
    starts = (np.arange(num_seqs + 1) * num_queries).astype(np.int32)
    num_tokens = num_seqs * num_queries
    tiles = np.zeros((max_prefill_tiles(num_tokens, num_seqs), 4), np.int32)
    num_decodes = num_seqs if num_queries == 1 else 0
    num_tiles = plan_prefill_tiles(starts, lens, num_decodes, tiles)
    # What the CPU's kernels do not look at is empty.
    arrays = dict.fromkeys(AttentionBatch._fields, np.zeros(0, np.int32)) | {
        "query_start_loc": starts,
        "seq_lens": lens,
        "block_tables": tables.reshape(num_seqs, blocks_per_seq),
        "num_decodes": np.array(num_decodes, np.int32),
        "prefill_tiles": tiles,
        "num_prefill_tiles": np.array(num_tiles, np.int32),
    }
    batch = AttentionBatch(**{name: jnp.asarray(array) for name, array in arrays.items()})
    first_block = jnp.int32(0)
    kv_cache = new_kv_cache(
        num_layers=1,
        num_blocks=num_blocks,
        block_size=shape.block_size,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        kernel=kernel,
    )
    slots = jnp.arange(shape.block_size, num_blocks * shape.block_size, dtype=jnp.int32)
    k, v = rng.standard_normal((2, len(slots), shape.num_kv_heads, shape.head_dim), np.float32)
    kv_cache = jax.jit(write_kv, donate_argnums=0)(kv_cache, k, v, slots, first_block=first_block)
    queries = jnp.asarray(
        rng.standard_normal((num_tokens, shape.num_heads, shape.head_dim), np.float32)
    )

    @jax.jit
    def attend(queries: jax.Array, kv_cache: KVCache, batch: AttentionBatch) -> jax.Array:
        return ragged_paged_attention(
            queries,
            kv_cache,
            batch,
            first_block=first_block,
            num_kv_heads=shape.num_kv_heads,
            scale=shape.head_dim**-0.5,
            decode_only=num_queries == 1,
        )

    def call() -> object:
        return jax.block_until_ready(attend(queries, kv_cache, batch))

    call()
    return call


@click.command()
@click.option("--kv-cache-dtype", "dtype", type=click.Choice(get_args(KVCacheDtype)))
@click.option("--num-heads", type=click.IntRange(min=1), default=9, show_default=True)
@click.option("--num-kv-heads", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--head-dim", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--block-size", type=int, default=16, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=30, show_default=True)
@click.option("--limit-s", type=float, default=10.0, show_default=True, help="For one case.")
@click.option("--max-context", type=int, default=8000, show_default=True, help="Leave out more.")
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False), help="Result file.")
def attention_kernels(
    dtype: KVCacheDtype | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    repeats: int,
    limit_s: float,
    max_context: int,
    output_json: Path | None,
) -> None:
    """Time the attention kernels of this machine against each other."""
    dtype = dtype or "bfloat16"
    shape = Shape(num_heads, num_kv_heads, head_dim, block_size)
    choice = choose_kernel(
        "native", platform="cpu", block_size=block_size, folder=kernels_dir(cache_dir())
    )
    if choice.library is not None:
        native.load(choice.library)
    results, rows = [], []
    for case in CASES:
        if case.context > max_context:
            continue
        timings = measure_case(case, shape, dtype, KERNELS, repeats=repeats, limit_s=limit_s)
        results.append({**asdict(case), "timings": [asdict(timing) for timing in timings]})
        slowest = max(timing.min_ms for timing in timings)
        rows += [
            (
                *(str(case.num_seqs), str(case.num_queries), str(case.context), timing.kernel),
                f"{timing.median_ms:.2f} / {timing.min_ms:.2f}",
                f"{timing.cpu_ms:.2f}",
                f"{slowest / timing.min_ms:.1f}",
            )
            for timing in timings
        ]
    print_rows(open_console(), HEADINGS, rows, f"{dtype}, {choice.reason}")
    if output_json is not None:
        document = {
            "schema": RESULT_SCHEMA,
            "environment": describe_environment(sys.argv),
            "native": choice.reason,
            "kv_cache_dtype": dtype,
            "shape": asdict(shape),
            "cases": results,
        }
        write_json(output_json, document)


if __name__ == "__main__":
    attention_kernels()
