"""Run the Mosaic GPU kernels in their interpreter, in a process of their own.

`python mosaic_scenes.py NAME`: prints the largest error of a scene; the interpreter prints races.
A kernel whose barriers do not match hangs here, as it would on a GPU: hence the process.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention_scene import Cache, Chunk, random_context, shuffled_blocks
from kernels_pallas import mosaic_decode, mosaic_gpu
from kernels_pallas.tuning import MosaicConfig, Phase, mosaic_config

# Every simulated program costs a tenth of a second: few, each of which takes several splits.
NUM_PROGRAMS = 3

# Threads of XLA's pool, which takes this for the number of processors. Simulated threads wait for
# each other inside of it: with one for each of two processors, every other run waited for ever.
NUM_THREADS = "16"

# A kernel that waits for what never comes would wait for ever.
TIMEOUT_S = 150


def largest_error(
    cache: Cache, spans: Sequence[tuple[int, int]], *, decode_only: bool = False, **context: int
) -> float:
    """Attend for (query tokens, length) sequences; return the difference from float64."""
    counts = [-(-length // cache.block_size) for _, length in spans]
    tables = shuffled_blocks(len(spans), counts, cache.num_blocks)
    chunks = [
        Chunk(random_context(seed, length, **context), length - queries, length, table)
        for seed, ((queries, length), table) in enumerate(zip(spans, tables, strict=True))
    ]
    results, padding = cache.run(chunks, decode_only=decode_only)
    assert np.isfinite(padding).all()
    return max(
        float(np.abs(result - cache.expected(chunk.context)[chunk.start :]).max())
        for chunk, result in zip(chunks, results, strict=True)
    )


def interpret(name: str) -> subprocess.CompletedProcess[str]:
    """Run a scene in a process of its own."""
    return subprocess.run(
        [sys.executable, __file__, name],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "NPROC": NUM_THREADS},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def error_without_races(name: str) -> float:
    """Run a scene, without races; return its largest error."""
    answer = interpret(name)
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert "RACE" not in answer.stdout + answer.stderr
    return float(answer.stdout.split()[-1])


DECODES = Cache(
    num_tokens=8, num_seqs=8, dtype="bfloat16", num_blocks=128, max_blocks=64, kernel="mosaic_gpu"
)
MIXED = replace(DECODES, num_tokens=80, num_seqs=4)

# Splits of fewer tiles than there are slots, as many, and more; two splits.
DECODE_SPANS = [(1, 1), (1, 64), (1, 65), (1, 256), (1, 600)]
MIXED_SPANS = [(1, 5), (1, 70), (3, 3), (67, 131)]

# Decodes: all in the window; a first tile wholly before it, a second in part; two splits. A chunk
# whose rows see no, some and all of a tile before them.
WINDOW = 130
WINDOW_SPANS = [(1, 129), (1, 323), (70, 400)]


def run(name: str) -> float:
    """Run the scene of that name."""
    if name == "decodes":
        return largest_error(DECODES, DECODE_SPANS, decode_only=True)
    if name == "mixed":
        return largest_error(MIXED, MIXED_SPANS)
    if name == "window_and_soft_cap":
        cache = replace(MIXED, sliding_window=WINDOW, soft_cap=2.0, block_size=64)
        return largest_error(cache, WINDOW_SPANS)
    if name == "seven_heads_in_large_blocks":
        cache = replace(MIXED, dtype="float16", block_size=128, num_blocks=16, max_blocks=8)
        return largest_error(cache, [(1, 129), (40, 200)], heads=7, kv_heads=1, head_dim=80)
    if name == "a_store_before_its_data":
        # What must be found: shared memory is sent away before all threads have written it.
        mosaic_decode.plgpu.commit_smem = lambda: None
        return largest_error(DECODES, DECODE_SPANS[:1], decode_only=True)
    raise ValueError(name)


def few_programs(phase: Phase, head_dim: int) -> MosaicConfig:
    return replace(mosaic_config(phase, head_dim), num_programs=NUM_PROGRAMS)


if __name__ == "__main__":
    mosaic_gpu.INTERPRETER = plgpu.InterpretGPUParams(detect_races=True)
    mosaic_gpu.mosaic_config = few_programs  # type: ignore[assignment]
    sys.stdout.write(f"largest error {run(sys.argv[1])}\n")
