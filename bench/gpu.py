"""What headrace does on a GPU, in one run that fits six minutes and downloads nothing.

    python -m bench.gpu

Self-tests of the kernels, their bandwidth and rate against what a copy and a product reach, then
the engine on random weights. Everything is in the file as soon as it is measured, so that a run
which is cut off keeps what it has. `--dry-run` takes the same way on a CPU, at sizes that mean
nothing.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import click
import jax
import numpy as np

from bench.environment import describe_environment
from bench.gpu_engine import MODELS, EngineUnderTest
from bench.gpu_kernels import Ceilings, KernelSizes, measure_ceilings, rank_kernels
from bench.report import open_console, print_rows, write_json
from kernels_pallas.gpu_choice import GPU_KERNELS, GpuUse, find_gpu_fault
from kernels_pallas.gpu_graphs import put_loops_into_graphs
from kernels_pallas.kernel_names import AttentionKernel
from kernels_pallas.kv_cache import KVCacheDtype

__all__ = ["GpuPlan", "GpuReport", "gpu", "measure_gpu"]

RESULT_SCHEMA = "headrace.bench.gpu/1"
DEFAULT_OUTPUT = Path("bench/results/gpu.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlan:
    """What to run on one model.

    Attributes:
        decode_batches: sequences of decode steps whose time is compared with the byte floor.
        same: (requests, prompt tokens, output tokens) that are all alike.
        mixed: requests of uniform lengths; once with continuous and once with static batching.
        mixed_lengths: the shortest and longest of them, prompts and outputs.
    """

    name: str
    decode_batches: tuple[int, ...]
    context: int
    same: tuple[int, int, int]
    mixed: int = 0
    mixed_lengths: tuple[int, int] = (100, 1024)
    max_num_batched_tokens: int = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPlan:
    """What a run measures, most important first."""

    self_tests: tuple[tuple[AttentionKernel, KVCacheDtype], ...]
    kernels: tuple[tuple[AttentionKernel, KVCacheDtype], ...]
    sizes: KernelSizes
    models: tuple[ModelPlan, ...]
    seconds: float


FULL = GpuPlan(
    self_tests=(
        ("mosaic_gpu", "bfloat16"),
        *(("triton", dtype) for dtype in get_args(KVCacheDtype)),
    ),
    kernels=(("mosaic_gpu", "bfloat16"), ("triton", "bfloat16"), ("triton", "fp8_e4m3")),
    sizes=KernelSizes(),
    models=(
        ModelPlan(
            name="qwen3-0.6b",
            decode_batches=(1, 8, 64, 256),
            context=1024,
            same=(256, 1024, 1024),
            mixed=256,
        ),
        ModelPlan(name="qwen3-8b", decode_batches=(1, 8, 64), context=1024, same=(256, 1024, 1024)),
        ModelPlan(name="llama-3-8b", decode_batches=(64,), context=1024, same=(64, 1024, 128)),
    ),
    seconds=360.0,
)

DRY = GpuPlan(
    self_tests=(("triton", "bfloat16"),),
    kernels=(("triton", "bfloat16"),),
    sizes=KernelSizes(
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        decodes=((1, 20),),
        prompts=(8,),
        copied_bytes=1 << 20,
        matrix_size=64,
        repeats=1,
    ),
    models=(
        ModelPlan(
            name="tiny",
            decode_batches=(1, 2),
            context=16,
            same=(3, 8, 4),
            mixed=4,
            mixed_lengths=(2, 8),
            max_num_batched_tokens=32,
        ),
    ),
    seconds=600.0,
)


@dataclass(slots=True)
class GpuReport:
    """Rows by section, in a file that is whole after every row."""

    path: Path
    head: Mapping[str, Any]
    sections: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, section: str, row: dict[str, Any]) -> None:
        self.sections.setdefault(section, []).append(row)
        write_json(self.path, {**self.head, **self.sections})


def measure_gpu(plan: GpuPlan, report: GpuReport, *, dry_run: bool) -> None:
    """Run the plan; what does not fit into its time is named and left out."""
    end_s = time.monotonic() + plan.seconds
    device = jax.devices()[0].device_kind
    works = set()
    for kernel, dtype in plan.self_tests:
        fault = _self_test(kernel, dtype, device, dry_run=dry_run)
        report.add("self_tests", {"kernel": kernel, "kv_cache_dtype": dtype, "fault": fault})
        if fault is None:
            works.add((kernel, dtype))
    ceilings = measure_ceilings(plan.sizes)
    report.add("ceilings", _ceiling_row(ceilings))
    for kernel, dtype in plan.kernels:
        if (kernel, dtype) not in works:
            continue
        for row in rank_kernels(kernel, dtype, plan.sizes, ceilings):
            report.add("kernels", row)
            # Half of the time is for the engine.
            if time.monotonic() > end_s - plan.seconds / 2:
                report.add("skipped", {"what": f"more of kernel {kernel} {dtype}"})
                break
    best: AttentionKernel = next(
        (kernel for kernel in GPU_KERNELS if (kernel, "bfloat16") in works), "reference"
    )
    for model in plan.models:
        if time.monotonic() > end_s:
            report.add("skipped", {"what": model.name})
            continue
        for row in _measure_model(model, "reference" if dry_run else best, ceilings, end_s):
            report.add("skipped" if "what" in row else "engine", row)


def _self_test(
    kernel: AttentionKernel, dtype: KVCacheDtype, device: str, *, dry_run: bool
) -> str | None:
    # On a CPU the kernel is interpreted, whatever the GPU is called.
    use = GpuUse(device="NVIDIA H200" if dry_run else device, kv_cache_dtype=dtype)
    return find_gpu_fault(kernel, use, block_size=16, may_run=True)


def _ceiling_row(ceilings: Ceilings) -> dict[str, Any]:
    return {
        "copy_gigabytes_per_s": ceilings.bytes_per_s / 1e9,
        "product_teraflop_per_s": ceilings.flop_per_s / 1e12,
    }


def _measure_model(
    plan: ModelPlan, kernel: AttentionKernel, ceilings: Ceilings, end_s: float
) -> Iterator[dict[str, Any]]:
    num_seqs, num_prompt, num_output = plan.same
    engine = EngineUnderTest(
        MODELS[plan.name],
        kernel=kernel,
        max_num_seqs=max(num_seqs, plan.mixed, *plan.decode_batches),
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=max(num_prompt + num_output, 2 * plan.mixed_lengths[1], 2 * plan.context),
    )
    about = {"model": plan.name, "kernel": kernel}
    yield {**about, "run": "start", "seconds": engine.start_s}
    for batch in plan.decode_batches:
        if time.monotonic() > end_s:
            yield {"what": f"{plan.name}, {batch} decodes"}
            continue
        # As many steps as half the context; the second half is timed.
        figures = engine.run([(plan.context, plan.context // 2)] * batch)
        floor = engine.floor_bytes(batch, plan.context * 11 // 8) / ceilings.bytes_per_s
        yield {
            **about,
            "run": f"{batch} decodes",
            **figures.row(),
            "floor_ms": floor * 1e3,
            "share_of_floor": floor * 1e3 / figures.step_ms,
        }
    if time.monotonic() > end_s:
        yield {"what": f"{plan.name}, {num_seqs} requests"}
        return
    figures = engine.run([(num_prompt, num_output)] * num_seqs)
    yield {**about, "run": f"{num_seqs} x {num_prompt}/{num_output}", **figures.row()}
    if not plan.mixed:
        return
    low, high = plan.mixed_lengths
    drawn = np.random.default_rng(0).integers(low, high + 1, (plan.mixed, 2)).tolist()
    lengths = [(prompt, output) for prompt, output in drawn]
    for batching in ("continuous", "static"):
        if time.monotonic() > end_s:
            yield {"what": f"{plan.name}, {batching} batching"}
            continue
        run = f"{plan.mixed} x {low}..{high}, {batching}"
        yield {**about, "run": run, **engine.run(lengths, batching=batching).row()}


@click.command()
@click.option(
    "--dry-run", is_flag=True, help="Tiny sizes, on any device; the figures mean nothing."
)
@click.option("--seconds", type=float, help="Begin nothing after this; 360 unless told.")
@click.option(
    "--output", type=click.Path(path_type=Path), default=DEFAULT_OUTPUT, show_default=True
)
def gpu(*, dry_run: bool, seconds: float | None, output: Path) -> None:
    """Measure headrace on this machine's GPU."""
    put_loops_into_graphs(os.environ)
    if not dry_run and jax.default_backend() != "gpu":
        raise click.ClickException("JAX sees no GPU here; --dry-run needs none")
    plan = DRY if dry_run else FULL
    if seconds is not None:
        plan = replace(plan, seconds=seconds)
    head = {
        "schema": RESULT_SCHEMA,
        "dry_run": dry_run,
        "device": jax.devices()[0].device_kind,
        "environment": describe_environment(sys.argv),
    }
    report = GpuReport(output, head)
    measure_gpu(plan, report, dry_run=dry_run)
    console = open_console()
    for section, rows in report.sections.items():
        names = sorted({name for row in rows for name in row}, key=_first_seen(rows).index)
        print_rows(console, names, [[_text(row.get(name)) for name in names] for row in rows])
        console.print(f"({section})", highlight=False)


def _first_seen(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={part}" for name, part in value.items())
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


if __name__ == "__main__":
    gpu()
