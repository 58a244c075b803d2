"""What headrace does on a GPU, in one run that fits six minutes and downloads nothing.

    python -m bench.gpu

Self-tests of the kernels, their bandwidth and rate against what a copy and a product reach,
products with weights of sixteen and of eight bits, the engine on random weights, and the gateway in
front of it. Everything is in the file and on the screen as soon as it is measured, so that a run
which is cut off keeps what it has. `--dry-run` takes the same way on a CPU, at sizes that mean
nothing.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click
import jax
import numpy as np

from bench.environment import describe_environment
from bench.gateway_under_test import GatewayFailed
from bench.gpu_engine import MODELS, EngineUnderTest
from bench.gpu_gateway import measure_gateway
from bench.gpu_kernels import Ceilings, KernelSizes, measure_ceilings, measure_kernels
from bench.gpu_products import ProductSizes, measure_products
from bench.gpu_tuning import rank_configs
from bench.report import open_console, print_rows, write_json
from jaxengine.config import BatchingMode
from kernels_pallas.gpu_choice import GPU_KERNELS, GpuUse, find_gpu_fault
from kernels_pallas.gpu_graphs import prepare_for_gpu
from kernels_pallas.kernel_names import AttentionKernel
from kernels_pallas.kv_cache import KVCacheDtype

__all__ = ["GpuPlan", "GpuReport", "gpu", "measure_gpu"]

RESULT_SCHEMA = "headrace.bench.gpu/1"
DEFAULT_OUTPUT = Path("bench/results/gpu.json")

BATCHING: tuple[BatchingMode, ...] = ("continuous", "static")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlan:
    """What to run on one model.

    Attributes:
        decode_batches: sequences of decode steps whose time is compared with the byte floor.
        context: tokens of each prompt there.
        decode_steps: run the same once more with so many steps at once.
        prompts: (requests, prompt tokens) of which only the first token is wanted.
        same: (requests, prompt tokens, output tokens) that are all alike.
        published_s: what another engine is said to take for these.
        mixed: requests of uniform lengths; once with continuous and once with static batching.
        mixed_lengths: the shortest and longest of them, prompts and outputs.
        streams: through the gateway, at the same time.
        stream_tokens: of each, prompt and output.
    """

    name: str
    decode_batches: tuple[int, ...]
    context: int
    decode_steps: int = 1
    prompts: tuple[int, int]
    same: tuple[int, int, int]
    published_s: float | None = None
    mixed: int = 0
    mixed_lengths: tuple[int, int] = (100, 1024)
    streams: tuple[int, ...] = ()
    stream_tokens: tuple[int, int] = (128, 256)
    max_num_batched_tokens: int = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPlan:
    """What a run measures, most important first.

    Attributes:
        products: with weights of each kind.
        seconds: nothing is begun after these; the kernels have the first third of them.
    """

    self_tests: tuple[tuple[AttentionKernel, KVCacheDtype], ...]
    kernels: tuple[tuple[AttentionKernel, KVCacheDtype], ...]
    sizes: KernelSizes
    products: ProductSizes
    models: tuple[ModelPlan, ...]
    seconds: float


FULL = GpuPlan(
    self_tests=(
        ("mosaic_gpu", "bfloat16"),
        ("mosaic_gpu", "float16"),
        *(("triton", dtype) for dtype in get_args(KVCacheDtype)),
    ),
    kernels=(("mosaic_gpu", "bfloat16"), ("triton", "bfloat16"), ("triton", "fp8_e4m3")),
    sizes=KernelSizes(),
    products=ProductSizes(),
    models=(
        ModelPlan(
            name="qwen3-0.6b",
            decode_batches=(1, 8, 64, 256),
            context=1024,
            decode_steps=4,
            prompts=(16, 2048),
            same=(256, 1024, 1024),
            mixed=256,
            streams=(1, 8, 64, 256),
        ),
        # The 256 decodes of the larger ones are those of their 256 requests.
        ModelPlan(
            name="qwen3-8b",
            decode_batches=(1, 8, 64),
            context=1024,
            prompts=(16, 2048),
            same=(256, 1024, 1024),
            published_s=30.85,  # SGLang, on an H200
        ),
        ModelPlan(
            name="llama-3-8b",
            decode_batches=(1, 8, 64),
            context=1024,
            prompts=(16, 2048),
            same=(256, 1024, 512),
        ),
    ),
    seconds=330.0,
)

DRY = GpuPlan(
    self_tests=(("triton", "bfloat16"),),
    kernels=(("triton", "bfloat16"),),
    sizes=KernelSizes(
        num_heads=4,
        num_kv_heads=2,
        head_dims=(64,),
        decodes=((1, 20),),
        prompts=(8,),
        copied_bytes=1 << 20,
        matrix_size=64,
        repeats=1,
    ),
    products=ProductSizes(num_outputs=64, num_inputs=32, num_rows=(8, 16), repeats=1),
    models=(
        ModelPlan(
            name="tiny",
            decode_batches=(1, 2),
            context=16,
            decode_steps=2,
            prompts=(2, 16),
            same=(3, 8, 4),
            published_s=1.0,
            mixed=4,
            mixed_lengths=(2, 8),
            streams=(1, 2),
            stream_tokens=(8, 4),
            max_num_batched_tokens=32,
        ),
    ),
    seconds=600.0,
)


@dataclass(slots=True)
class GpuReport:
    """Rows by section, told as they come, in a file that is whole after every row."""

    path: Path
    head: Mapping[str, Any]
    tell: Callable[[str], None] = lambda line: None
    sections: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, section: str, row: dict[str, Any]) -> None:
        self.sections.setdefault(section, []).append(row)
        new = self.path.with_name(f".{self.path.name}.new")
        write_json(new, {**self.head, **self.sections})
        new.replace(self.path)  # whoever ends us now leaves a whole file
        shown = (f"{name}={_text(value)}" for name, value in row.items() if name != "entry")
        self.tell(f"{section}: {' '.join(shown)}")

    def fail(self, what: str, error: Exception) -> None:
        """Name what went wrong; the run goes on."""
        self.add("failed", {"what": what, "error": str(error)[:300]})

    def skip(self, what: str) -> None:
        """Name what there is no time for."""
        self.add("skipped", {"what": what})


def measure_gpu(plan: GpuPlan, report: GpuReport, *, dry_run: bool) -> None:
    """Run the plan; what does not fit into its time is named and left out."""
    start_s = time.monotonic()
    end_s = start_s + plan.seconds
    works = set(_run_self_tests(plan, report, dry_run=dry_run))
    ceilings = measure_ceilings(plan.sizes)
    report.add("ceilings", _ceiling_row(ceilings))
    for kernel, dtype in plan.kernels:
        if (kernel, dtype) not in works:
            continue
        for row in measure_kernels(kernel, dtype, plan.sizes, ceilings):
            report.add("kernels", row)
            if time.monotonic() > start_s + plan.seconds / 3:
                report.skip(f"more of kernel {kernel} {dtype}")
                break
    for row in rank_configs(report.sections.get("kernels", [])):
        report.add("tuning", row)
    for row in measure_products(plan.products, ceilings):
        report.add("products", row)
    best: AttentionKernel = next(
        (kernel for kernel in GPU_KERNELS if (kernel, "bfloat16") in works), "reference"
    )
    model_start_s = 0.0
    for model in plan.models:
        # A model starts in about the time of the one before.
        if time.monotonic() + model_start_s > end_s:
            report.skip(model.name)
            continue
        kernel = "reference" if dry_run else best
        try:
            model_start_s = _measure_model(model, kernel, ceilings, end_s, report)
        except Exception as error:  # one that does not fit must not end the others
            report.fail(model.name, error)


def _run_self_tests(
    plan: GpuPlan, report: GpuReport, *, dry_run: bool
) -> Iterator[tuple[AttentionKernel, KVCacheDtype]]:
    """Test all at the same time, each in a process of its own; yield those without a fault."""
    # On a CPU the kernel is interpreted, whatever the GPU is called.
    device = "NVIDIA H200" if dry_run else jax.devices()[0].device_kind

    def test(kernel: AttentionKernel, dtype: KVCacheDtype) -> str | None:
        use = GpuUse(device=device, kv_cache_dtype=dtype)
        return find_gpu_fault(kernel, use, block_size=16, may_run=True)

    with ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 1) // 2)) as pool:
        jobs = [(*case, pool.submit(test, *case)) for case in plan.self_tests]
        for kernel, dtype, job in jobs:
            fault = job.result()
            report.add("self_tests", {"kernel": kernel, "kv_cache_dtype": dtype, "fault": fault})
            if fault is None:
                yield kernel, dtype


def _ceiling_row(ceilings: Ceilings) -> dict[str, Any]:
    return {
        "copy_gigabytes_per_s": ceilings.bytes_per_s / 1e9,
        "product_teraflop_per_s": ceilings.flop_per_s / 1e12,
    }


def _measure_model(
    plan: ModelPlan, kernel: AttentionKernel, ceilings: Ceilings, end_s: float, report: GpuReport
) -> float:
    """Run what there is time for; return how long the model took to start."""
    num_seqs, num_prompt, num_output = plan.same
    engine = EngineUnderTest(
        MODELS[plan.name],
        kernel=kernel,
        max_num_seqs=max(num_seqs, plan.mixed, *plan.decode_batches, *plan.streams),
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=max(
            num_prompt + num_output,
            2 * plan.mixed_lengths[1],
            2 * plan.context,
            sum(plan.stream_tokens),
            plan.prompts[1] + 1,
        ),
        decode_steps=plan.decode_steps,
    )
    start_s = engine.start_s
    about = {"model": plan.name, "kernel": kernel}
    report.add("engine", {**about, "run": "start", "seconds": start_s})

    def is_late(what: str) -> bool:
        late = time.monotonic() > end_s
        if late:
            report.skip(f"{plan.name}, {what}")
        return late

    def run_same(run: str, batch: int, prompt: int, output: int, **changes: Any) -> dict[str, Any]:
        figures = engine.run([(prompt, output)] * batch, **changes)
        # Steps are timed in the second half of the outputs.
        floor_s = engine.floor_bytes(batch, prompt + 3 * output // 4) / ceilings.bytes_per_s
        share = 1e3 * floor_s / figures.step_ms
        floor = {"floor_ms": 1e3 * floor_s, "share_of_floor": share}
        return {**about, "run": run, **figures.row(), **floor}

    try:
        for batch in plan.decode_batches:
            if not is_late(run := f"{batch} decodes"):
                lengths = (batch, plan.context, plan.context // 2)
                report.add("engine", row := run_same(run, *lengths))
                if plan.decode_steps > 1:
                    run = f"{run}, {plan.decode_steps} steps at once"
                    again = run_same(run, *lengths, decode_steps=plan.decode_steps)
                    again["gap_share"] = max(0.0, 1 - row["device_ms"] / again["step_ms"])
                    report.add("engine", again)
        if not is_late(run := "{} prompts of {}".format(*plan.prompts)):
            figures = engine.run([(plan.prompts[1], 1)] * plan.prompts[0])
            per_s = figures.prompt_tokens / figures.seconds
            share = engine.flop_per_token * per_s / ceilings.flop_per_s
            row = {"seconds": figures.seconds, "prompt_tokens_per_s": per_s}
            report.add("engine", {**about, "run": run, **row, "share_of_product": share})
        if not is_late(run := f"{num_seqs} x {num_prompt}/{num_output}"):
            row = run_same(run, *plan.same)
            if plan.published_s is not None:
                row["published_s"] = plan.published_s
            report.add("engine", row)
        if plan.streams and not is_late("gateway"):
            prompt, output = plan.stream_tokens
            rows = measure_gateway(engine, plan.streams, prompt_len=prompt, output_len=output)
            try:
                for row in rows:
                    report.add("gateway", {**about, **row})
            except GatewayFailed as error:
                report.fail(f"gateway of {plan.name}", error)
        low, high = plan.mixed_lengths
        drawn = np.random.default_rng(0).integers(low, high + 1, (plan.mixed, 2)).tolist()
        for batching in BATCHING if plan.mixed else ():
            if not is_late(run := f"{plan.mixed} x {low}..{high}, {batching}"):
                figures = engine.run([(p, o) for p, o in drawn], batching=batching)
                report.add("engine", {**about, "run": run, **figures.row()})
    finally:
        engine.close()
    return start_s


@click.command()
@click.option(
    "--dry-run", is_flag=True, help="Tiny sizes, on any device; the figures mean nothing."
)
@click.option("--seconds", type=float, help="Begin nothing after this; 330 unless told.")
@click.option(
    "--output", type=click.Path(path_type=Path), default=DEFAULT_OUTPUT, show_default=True
)
def gpu(*, dry_run: bool, seconds: float | None, output: Path) -> None:
    """Measure headrace on this machine's GPU."""
    prepare_for_gpu(os.environ)
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
    report = GpuReport(output, head, tell=partial(click.echo, err=True))
    measure_gpu(plan, report, dry_run=dry_run)
    console = open_console()
    for section, rows in report.sections.items():
        if section == "tuning":
            continue
        names = list(dict.fromkeys(name for row in rows for name in row))
        print_rows(console, names, [[_text(row.get(name)) for name in names] for row in rows])
        console.print(f"({section})", highlight=False)
    click.echo("# for kernels_pallas/tuning.py, the fastest first")
    for row in report.sections.get("tuning", []):
        click.echo(f"# {row['kernel']}\n{row['entry']}")


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


if __name__ == "__main__":
    gpu()
