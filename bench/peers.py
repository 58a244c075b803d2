"""`headrace bench peers`: the same work for headrace and for other servers, on this machine."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from bench.comparison.figures import PeersResult, ProductLimit, SideRun, judge_peers
from bench.comparison.golden import GoldenCase, load_golden
from bench.comparison.plan import WORKLOAD_KINDS, PeersPlan, WorkloadKind
from bench.comparison.report import (
    SIDE_HEADINGS,
    WORKLOAD_HEADINGS,
    failure_lines,
    limit_lines,
    peers_panels,
    side_rows,
    workload_rows,
)
from bench.comparison.runs import PeersRunner, measure_limit
from bench.comparison.sides import PeerPaths, Side, find_default_model, list_sides
from bench.own_server import BenchSetup, measuring_command
from bench.report import print_rows
from bench.server_process import ServerFailed
from bench.svg import draw_figure
from bench.verdict import print_verdicts

__all__ = ["peers"]

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "golden_smollm2.json"
QUICK = {
    "streams": "1,2",
    "input_len": 8,
    "output_len": 4,
    "batch_streams": 2,
    "exponential_mean": 4,
    "exponential_cap": 8,
    "prefix_len": 40,
    "prefix_output_len": 4,
    "disturbed_streams": 2,
    "long_len": 100,
    "idle_s": 0.2,
    "open_streams": 8,
    "open_input_len": 4,
    "open_output_len": 2,
    "rounds": 1,
}
PROGRAM = click.Path(path_type=Path, exists=True, dir_okay=False)


def parse_streams(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[int, ...]:
    """Turn "1,8,32" into numbers."""
    try:
        counts = tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list such as 1,8,32") from None
    if min(counts) < 1 or len(set(counts)) < len(counts):
        raise click.BadParameter("numbers of streams are positive, and each named once")
    return counts


def sized[F: Callable[..., None]](
    flag: str, name: str, default: int, help_text: str
) -> Callable[[F], F]:
    """An option that is a size of the plan."""
    return click.option(
        flag, name, type=click.IntRange(1), default=default, show_default=True, help=help_text
    )


@measuring_command(quick=QUICK)
@click.option("--llama-server", type=PROGRAM, help="llama.cpp's server.")
@click.option("--vllm-python", type=PROGRAM, help="Python of an environment with vLLM.")
@click.option("--openvino-python", type=PROGRAM, help="Likewise with OpenVINO GenAI.")
@click.option("--transformers-python", type=PROGRAM, help="Likewise with transformers.")
@click.option("--gguf", type=PROGRAM, help="For llama.cpp and OpenVINO. [default: the model]")
@click.option(
    "--hf-model",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Directory with the same model, for vLLM and transformers.",
)
@click.option("--int8", "with_int8", is_flag=True, help="headrace once more, with int8 weights.")
@click.option(
    "--workloads",
    "kinds",
    type=click.Choice(WORKLOAD_KINDS),
    multiple=True,
    default=WORKLOAD_KINDS,
    help="Repeatable; by default all.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="The order of the sides is reversed each time.",
)
@click.option(
    "--cold-start/--no-cold-start",
    default=True,
    show_default=True,
    help="In the first round the sides have nothing compiled.",
)
@click.option(
    "--golden",
    "golden_path",
    type=PROGRAM,
    help="Answers that headrace must give. [default: the default model's, in a checkout]",
)
@click.option("--limit/--no-limit", default=True, help="Measure how fast products are here.")
@click.option("--streams", callback=parse_streams, default="1,8,32,64", show_default=True)
@sized("--input-len", "input_len", 128, "Tokens of a prompt.")
@sized("--output-len", "output_len", 64, "Tokens of an answer.")
@sized("--requests-per-stream", "requests_per_stream", 2, "Of closed loops.")
@sized("--batch-streams", "batch_streams", 32, "Of exponential, prefix and prefill.")
@sized("--exponential-mean", "exponential_mean", 128, "Tokens of an answer, on average.")
@sized("--exponential-cap", "exponential_cap", 512, "Longest answer.")
@sized("--prefix-len", "prefix_len", 640, "Prompts of which 90 % are the same.")
@sized("--prefix-output-len", "prefix_output_len", 32, "Their answers.")
@sized("--disturbed-streams", "disturbed_streams", 16, "Beside the long prompt.")
@sized("--long-len", "long_len", 1408, "The long prompt.")
@click.option(
    "--idle-seconds",
    "idle_s",
    type=click.FloatRange(min=0, min_open=True),
    default=2.0,
    show_default=True,
    help="The streams run alone for so long before it.",
)
@sized("--open-streams", "open_streams", 1000, "That arrive all at once.")
@sized("--open-input-len", "open_input_len", 32, "Their prompts.")
@sized("--open-output-len", "open_output_len", 16, "Their answers.")
@click.option("--output-svg", type=click.Path(path_type=Path, dir_okay=False), help="Chart file.")
def peers(
    setup: BenchSetup,
    *,
    llama_server: Path | None,
    vllm_python: Path | None,
    openvino_python: Path | None,
    transformers_python: Path | None,
    gguf: Path | None,
    hf_model: Path | None,
    with_int8: bool,
    rounds: int,
    cold_start: bool,
    golden_path: Path | None,
    limit: bool,
    output_svg: Path | None,
    kinds: tuple[WorkloadKind, ...],
    **sizes: Any,
) -> None:
    """Compare headrace with the servers that are named, on the same seeded requests.

    Each side is started, warmed, measured and stopped, then the next one; a peer that fails is
    reported and left out. SERVE_ARGUMENTS go to `headrace serve`.
    """
    plan = PeersPlan(
        kinds=tuple(dict.fromkeys(kinds)), seed=setup.seed, vocab_size=setup.vocab_size, **sizes
    )
    try:
        model = Path(setup.model) if setup.model else find_default_model()
        paths = PeerPaths(
            model=model,
            gguf=gguf or (model if model.suffix == ".gguf" else None),
            llama_server=llama_server,
            vllm_python=vllm_python,
            openvino_python=openvino_python,
            transformers_python=transformers_python,
            hf_model=hf_model,
        )
        sides = list_sides(paths, plan, setup.serve_arguments, with_int8=with_int8)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except (ServerFailed, subprocess.SubprocessError) as error:
        raise click.ClickException(str(error)) from None
    with ended_in_order(), kept_folder(cold_start) as folder:
        runner = PeersRunner(
            plan=plan,
            cases=find_cases(golden_path, setup.model),
            folder=folder,
            startup_timeout_s=setup.startup_timeout_s,
            timeout_s=setup.timeout_s,
            progress=setup.progress,
        )
        result = measure(runner, sides, rounds, model if limit else None)
    verdicts = judge_peers(result, plan)
    print_rows(setup.console, WORKLOAD_HEADINGS, workload_rows(result))
    print_rows(setup.console, SIDE_HEADINGS, side_rows(result, plan))
    print_verdicts(setup.console, verdicts)
    for line in [*limit_lines(result, plan), *failure_lines(result)]:
        setup.console.print(line, markup=False, highlight=False)
    if output_svg is not None:
        output_svg.parent.mkdir(parents=True, exist_ok=True)
        figure = draw_figure("headrace and its peers", peers_panels(result, plan))
        output_svg.write_text(figure, encoding="utf-8")
    note_failures(setup, result, {side.name for side in sides if side.kind == "headrace"})
    setup.finish(
        {**asdict(plan), "rounds": rounds, "cold_start": cold_start},
        {
            "sides": [side.describe() for side in sides],
            "verdicts": [asdict(verdict) for verdict in verdicts],
            **result.as_dict(),
        },
    )


@contextmanager
def ended_in_order() -> Iterator[None]:
    """A SIGTERM ends the block as an error does, so that no server stays behind."""

    def end(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def kept_folder(cold_start: bool) -> Iterator[Path | None]:
    """A folder for what the sides compile, for as long as the block; None without cold starts."""
    if not cold_start:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="headrace-peers-") as folder:
        yield Path(folder)


def find_cases(path: Path | None, model: str | None) -> Sequence[GoldenCase]:
    """Golden answers: those that are named, or the default model's where they are at hand."""
    if path is None and (model is not None or not GOLDEN.exists()):
        return ()
    return load_golden(path or GOLDEN)


def measure(
    runner: PeersRunner, sides: Sequence[Side], rounds: int, limited: Path | None
) -> PeersResult:
    """All rounds, and before each one what the model's products reach."""
    runs: list[SideRun] = []
    limits: dict[int, ProductLimit] = {}
    for round_number in range(rounds):
        if limited is not None:
            limits[round_number] = measure_limit(limited)
        # Who was never ready will not be so the next time.
        broken = {run.side for run in runs if run.ready_s is None}
        able = [side for side in sides if side.name not in broken]
        runs += runner.measure_round(able, round_number)
    names = [workload.name for workload in runner.plan.workloads(0, "tokens")]
    return PeersResult(
        sides=[side.name for side in sides], workloads=names, runs=runs, limits=limits
    )


def note_failures(setup: BenchSetup, result: PeersResult, ours: set[str]) -> None:
    """What failed of ours makes the command fail; a peer's failure does not."""
    for run in result.runs:
        if run.side not in ours:
            continue
        for text in (run.failure, *(entry.failure for entry in run.workloads)):
            if text is not None:
                setup.note_failures({run.side: 1}, text)
        for entry in run.workloads:
            if entry.summary is not None:
                setup.note_failures(entry.summary.errors, entry.summary.error_example)
