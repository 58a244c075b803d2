"""`headrace bench simulate`: plan a fleet with the real scheduler and a model of the device."""

import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console

from bench.environment import describe_environment
from bench.report import write_json
from bench.simulation.calibration import CalibratedDevice, calibrate
from bench.simulation.device import MODELS, DeviceModel, RooflineDevice
from bench.simulation.engine_sizes import (
    ATTENTION_KERNELS,
    BATCHING_MODES,
    SCHEDULING_POLICIES,
    EngineSizes,
    engine_for,
)
from bench.simulation.fleet import Affinity, Fleet
from bench.simulation.plan import Choices, RunResult, SimulationPlan, run_plan
from bench.simulation.report import (
    draw_runs,
    fleet_notes,
    make_comparison_table,
    make_runs_tables,
    run_dict,
)
from bench.simulation.router import ROUTERS
from bench.simulation.step_file import StepFileError, load_steps
from bench.simulation.validation import Comparison, compare
from bench.simulation.workload import LENGTHS, LengthPair, WorkloadConfig, fixed_lengths
from bench.summary import Goodput

__all__ = ["simulate"]

RESULT_SCHEMA = "headrace.bench.simulate/1"
MOST_REPLICAS = 10_000


type ClickCallback = Callable[[click.Context, click.Parameter, str], Any]


def list_of(part: Callable[[str], Any]) -> ClickCallback:
    """A callback for "A,B,...": each part turned into a value."""

    def parse(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[Any, ...]:
        try:
            return tuple(part(word.strip()) for word in value.split(","))
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return parse


def one_of(choices: Sequence[str]) -> Callable[[str], str]:
    """A part of a list: one of these words."""

    def parse(word: str) -> str:
        if word not in choices:
            raise ValueError(f"{word!r} is not one of {', '.join(choices)}")
        return word

    return parse


def count(word: str) -> int:
    """A part of a list: a number of replicas."""
    if not word.isdecimal() or not 1 <= int(word) <= MOST_REPLICAS:
        raise ValueError(f"{word!r} is not a number from 1 to {MOST_REPLICAS}")
    return int(word)


def rate(word: str) -> float:
    """A part of a list: requests per second, or inf."""
    value = float(word)
    if not value > 0:
        raise ValueError(f"{word!r} is not a positive rate")
    return value


def target(word: str) -> float | None:
    """A part of a list: milliseconds, or none. In seconds."""
    if word == "none":
        return None
    value = float(word)
    if not 0 < value < math.inf:
        raise ValueError(f"{word!r} is not a positive number of milliseconds")
    return value / 1e3


def parse_lengths(_ctx: click.Context, _param: click.Parameter, value: str) -> LengthPair:
    """One of the known distributions of lengths, or "fixed:PROMPT,OUTPUT"."""
    if value in LENGTHS:
        return LENGTHS[value]
    match = re.fullmatch(r"fixed:([1-9]\d*),([1-9]\d*)", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is none of {', '.join(LENGTHS)}, fixed:PROMPT,OUTPUT")
    return fixed_lengths(int(match[1]), int(match[2]))


def parse_goodput(
    _ctx: click.Context, _param: click.Parameter, value: str | None
) -> Goodput | None:
    """Turn "ttft:500,itl:50" into demands."""
    try:
        return None if value is None else Goodput.parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


POSITIVE = click.FloatRange(min=0, min_open=True)
SHARE = click.FloatRange(min=0, max=1)


@click.command()
@click.option(
    "--model",
    type=click.Choice(list(MODELS)),
    default="8b",
    show_default=True,
    help="Shape on an H200: Qwen3-0.6B, Llama-3-8B or Llama-3-70B.",
)
@click.option(
    "--tensor-parallel-size", type=int, help="Chips of a replica; by default 1, for 70b 4."
)
@click.option(
    "--calibrate",
    "calibrations",
    multiple=True,
    metavar="FILE|URL",
    help="Fit the device to recorded steps instead: the JSON of /v1/steps?shares=1, or a server.",
)
@click.option(
    "--validate",
    "validations",
    multiple=True,
    metavar="FILE|URL",
    help="Compare a recorded run with its simulation on that device, and do nothing else.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    help="The run to validate was a closed loop with so many requests in flight.",
)
@click.option("--replicas", callback=list_of(count), default="1", show_default=True, help="A list.")
@click.option(
    "--router",
    "routers",
    callback=list_of(one_of(ROUTERS)),
    default="round-robin",
    show_default=True,
    help=f"A list of {', '.join(ROUTERS)}.",
)
@click.option(
    "--affinity",
    type=click.Choice(get_args(Affinity)),
    default="session",
    show_default=True,
    help="What prefix-affine routing keeps together: conversations, or system prompts.",
)
@click.option(
    "--batching",
    callback=list_of(one_of(BATCHING_MODES)),
    default="continuous",
    show_default=True,
    help=f"A list of {', '.join(BATCHING_MODES)}.",
)
@click.option(
    "--scheduling-policy",
    "policies",
    callback=list_of(one_of(SCHEDULING_POLICIES)),
    default="fair",
    show_default=True,
    help=f"A list of {', '.join(SCHEDULING_POLICIES)}.",
)
@click.option(
    "--target-itl-ms",
    "target_itls_s",
    callback=list_of(target),
    default="none",
    show_default=True,
    help="A list of times, or none.",
)
@click.option(
    "--request-rate",
    "rates",
    callback=list_of(rate),
    default="5",
    show_default=True,
    help="A list of requests per second for each replica; inf sends all at once.",
)
@click.option("--num-requests", type=click.IntRange(min=1), default=10_000, show_default=True)
@click.option(
    "--workload",
    "lengths",
    callback=parse_lengths,
    default="azure-conversation",
    show_default=True,
    help=f"Lengths: {', '.join(LENGTHS)}, or fixed:PROMPT,OUTPUT.",
)
@click.option(
    "--burstiness",
    type=POSITIVE,
    default=1.0,
    show_default=True,
    help="Shape of the gamma-distributed gaps: 1 is Poisson, below 1 comes in bursts.",
)
@click.option("--shared-prefix-len", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--groups",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Different shared prefixes (system prompts), by Zipf's law.",
)
@click.option(
    "--turns",
    type=click.FloatRange(min=1),
    default=1.0,
    show_default=True,
    help="Mean turns of a conversation; later ones begin with all that came before.",
)
@click.option("--tenants", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--heavy-share", type=SHARE, help="Share of the requests of the first tenant.")
@click.option("--urgent-share", type=SHARE, default=0.0, help="Share with priority -1.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--max-model-len", type=click.IntRange(min=8))
@click.option("--max-num-batched-tokens", type=click.IntRange(min=1))
@click.option("--max-num-seqs", type=click.IntRange(min=1))
@click.option("--block-size", type=click.IntRange(min=8))
@click.option(
    "--num-kv-blocks",
    type=click.IntRange(min=2),
    help="By default what the memory holds; on a calibrated device, never too few.",
)
@click.option("--watermark", type=float, default=0.01, show_default=True)
@click.option("--batch-window-ms", type=POSITIVE, default=50.0, show_default=True)
@click.option("--long-prefill-token-threshold", type=click.IntRange(min=0), default=0)
@click.option("--queue-timeout", type=POSITIVE, help="Seconds after which who waits leaves.")
@click.option("--prefix-caching/--no-prefix-caching", default=True, show_default=True)
@click.option("--overlap/--no-overlap", default=True, show_default=True)
@click.option(
    "--attention-kernel",
    type=click.Choice(ATTENTION_KERNELS),
    help="Of the recorded server; it decides the compiled sizes. [default: native, or a GPU's]",
)
@click.option("--goodput", callback=parse_goodput, help="An objective: ttft:500,itl:50,e2e:10000.")
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    default=os.cpu_count(),
    help="Replicas are dealt out to so many processes, where the router has to guess loads; "
    "with 1 all share a clock, and it knows them.",
)
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="An SVG file.")
def simulate(**options: Any) -> None:
    """Simulate a fleet: the engine's own scheduler and KV cache, a clock that jumps, no device.

    Options that take a list (A,B,...) are varied: every combination is a run.
    """
    console = Console()
    try:
        device = make_device(options)
        fleet = make_fleet(options, device)
        document: dict[str, Any] = {
            "schema": RESULT_SCHEMA,
            "environment": describe_environment(sys.argv),
            "device": describe_device(device),
            "engine": asdict(fleet.config),
        }
        if options["validations"]:
            comparison = validate(options, fleet, console)
            document["validation"] = comparison.as_dict()
        else:
            results = run(options, fleet, console)
            document["runs"] = [run_dict(result) for result in results]
            if options["plot"] is not None:
                options["plot"].write_text(draw_runs(f"Simulated: {device.name}", results))
    except (StepFileError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if options["output_json"] is not None:
        write_json(options["output_json"], document)


def make_device(options: dict[str, Any]) -> DeviceModel:
    """The device that the options ask for."""
    if options["calibrations"]:
        return calibrate(load_steps(options["calibrations"]))
    if options["validations"]:
        raise click.UsageError("--validate needs a device to compare with: --calibrate")
    num_chips = options["tensor_parallel_size"] or (4 if options["model"] == "70b" else 1)
    return RooflineDevice(model=MODELS[options["model"]], num_chips=num_chips)


def make_fleet(options: dict[str, Any], device: DeviceModel) -> Fleet:
    """One replica; what is varied is set later."""
    sizes = EngineSizes(
        max_model_len=options["max_model_len"],
        max_num_batched_tokens=options["max_num_batched_tokens"],
        max_num_seqs=options["max_num_seqs"],
        block_size=options["block_size"],
        num_blocks=options["num_kv_blocks"],
        watermark=options["watermark"],
        batch_window_s=options["batch_window_ms"] / 1e3,
        long_prefill_token_threshold=options["long_prefill_token_threshold"],
        queue_timeout_s=options["queue_timeout"],
        enable_prefix_caching=options["prefix_caching"],
        overlap=options["overlap"],
        attention_kernel=options["attention_kernel"],
    )
    return Fleet(config=engine_for(device, sizes), device=device)


def run(options: dict[str, Any], fleet: Fleet, console: Console) -> list[RunResult]:
    """Simulate every combination, and show them."""
    workload = WorkloadConfig(
        num_requests=options["num_requests"],
        request_rate=1.0,
        lengths=options["lengths"],
        burstiness=options["burstiness"],
        num_groups=options["groups"],
        shared_prefix_len=options["shared_prefix_len"],
        turns=options["turns"],
        num_tenants=options["tenants"],
        heavy_share=options["heavy_share"],
        urgent_share=options["urgent_share"],
        max_model_len=fleet.config.max_model_len,
        seed=options["seed"],
    )
    plan = SimulationPlan(
        workload=workload,
        engine=fleet.config,
        device=fleet.device,
        affinity=options["affinity"],
        goodput=options["goodput"],
        num_processes=options["processes"],
    )
    choices = Choices(
        num_replicas=options["replicas"],
        routers=options["routers"],
        batching=options["batching"],
        scheduling_policies=options["policies"],
        target_itls_s=options["target_itls_s"],
        rates_per_replica=options["rates"],
    )
    results = run_plan(plan, choices, report=report_progress)
    console.print(
        f"{fleet.device.name}, {fleet.config.num_blocks} KV blocks of {fleet.config.block_size} "
        "tokens per replica"
    )
    for table in make_runs_tables(results):
        console.print(table)
    for note in fleet_notes(results):
        console.print(note, markup=False, highlight=False)
    if not all(result.exact_loads for result in results):
        console.print("Routers guessed the loads of replicas; --processes 1 lets them know.")
    return results


def report_progress(result: RunResult) -> None:
    figures = result.figures
    click.echo(
        f"{result.name} at {result.variant.rate_per_replica:g}/s: {figures.num_requests} requests "
        f"in {figures.duration_s:.0f} s, simulated in {result.wall_s:.1f} s",
        err=True,
    )


def validate(options: dict[str, Any], fleet: Fleet, console: Console) -> Comparison:
    """Compare a recorded run with its simulation, and show both."""
    steps = load_steps(options["validations"])
    comparison = compare(steps, fleet, concurrency=options["concurrency"])
    console.print(make_comparison_table(comparison))
    console.print(
        f"Throughput {'within' if comparison.holds else 'NOT within'} 15 %: "
        f"{100 * comparison.throughput_error:+.1f} %"
    )
    return comparison


def describe_device(device: DeviceModel) -> dict[str, Any]:
    """For JSON: with these, the figures can be computed again."""
    if isinstance(device, CalibratedDevice):
        return device.as_dict()
    return {"name": device.name} | (asdict(device) if isinstance(device, RooflineDevice) else {})
