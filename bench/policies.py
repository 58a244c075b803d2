"""`headrace bench policies`: what continuous batching gains over dynamic and static batching.

The same engine, kernels and requests for all three; only --batching differs.
"""

from dataclasses import asdict
from pathlib import Path

import click

from bench.lengths import LengthKind
from bench.objective import Objective, Probe
from bench.own_server import BenchSetup, measuring_command
from bench.policy_plan import ArrivalKind, PolicyPlan
from bench.policy_results import (
    PROBE_HEADINGS,
    ROW_HEADINGS,
    Mode,
    ideal_lines,
    objective_verdicts,
    policy_document,
    policy_panels,
    policy_rows,
    policy_verdicts,
    probe_rows,
    summarize_policies,
)
from bench.policy_runs import RateSearch, measure_rounds, search_rates
from bench.report import print_rows
from bench.svg import draw_figure
from bench.verdict import print_verdicts

__all__ = ["policies"]

QUICK = {
    "batch_size": 4,
    "num_batches": 2,
    "rounds": 1,
    "output_mean": 6,
    "output_cap": 24,
    "input_range": "4:12",
    "probe_seconds": 2.0,
    "probe_batches": 1,
}


def parse_range(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[int, int]:
    """Turn "16:128" into two numbers."""
    low, _, high = value.partition(":")
    try:
        return int(low), int(high)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a range such as 16:128") from None


def parse_objective(
    _ctx: click.Context, _param: click.Parameter, value: str | None
) -> Objective | None:
    """Turn "ttft_p99=2000,itl_p99=200" into bounds."""
    try:
        return None if value is None else Objective.parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@measuring_command(quick=QUICK)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Rows of the engine: its --max-num-seqs.",
)
@click.option(
    "--num-batches",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Requests of a workload, in full batches.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Repetitions; the modes take turns in going first.",
)
@click.option(
    "--lengths",
    "length_kinds",
    type=click.Choice(["uniform", "exponential"]),
    multiple=True,
    default=("uniform", "exponential"),
    help="Of outputs; repeatable.",
)
@click.option(
    "--arrivals",
    "arrival_kinds",
    type=click.Choice(["burst", "poisson"]),
    multiple=True,
    default=("burst", "poisson"),
    help="Repeatable.",
)
@click.option("--output-mean", type=int, default=48, show_default=True, help="Tokens.")
@click.option("--output-cap", type=int, default=384, show_default=True, help="Longest output.")
@click.option(
    "--input-range",
    callback=parse_range,
    default="16:128",
    show_default=True,
    help="Prompt lengths, uniform.",
)
@click.option(
    "--request-rate",
    type=click.FloatRange(min=0, min_open=True),
    help="Of the Poisson arrivals. [default: 80 % of what continuous does in a burst]",
)
@click.option(
    "--slo",
    "objective",
    callback=parse_objective,
    help="Latency objective in ms, such as ttft_p99=10000,itl_p99=250: find the highest "
    "rate that keeps it in each mode.",
)
@click.option(
    "--probe-seconds",
    type=float,
    default=60.0,
    show_default=True,
    help="Arrivals of each rate that is tried for --slo.",
)
@click.option(
    "--probe-batches",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="At least so many full batches of them.",
)
@click.option("--output-svg", type=click.Path(path_type=Path, dir_okay=False), help="Chart file.")
def policies(
    setup: BenchSetup,
    *,
    batch_size: int,
    num_batches: int,
    rounds: int,
    length_kinds: tuple[LengthKind, ...],
    arrival_kinds: tuple[ArrivalKind, ...],
    output_mean: int,
    output_cap: int,
    input_range: tuple[int, int],
    request_rate: float | None,
    objective: Objective | None,
    probe_seconds: float,
    probe_batches: int,
    output_svg: Path | None,
) -> None:
    """Compare --batching continuous, dynamic and static on the same seeded requests.

    Each round starts a server for each mode and sends it every workload. SERVE_ARGUMENTS go to
    each server. The ideal gain is the mean over static batches of their longest output over the
    mean output: what there is to gain while rows never lack a request.
    """
    try:
        plan = PolicyPlan(
            batch_size=batch_size,
            num_batches=num_batches,
            output_mean=output_mean,
            output_cap=output_cap,
            input_min=input_range[0],
            input_max=input_range[1],
            lengths=tuple(dict.fromkeys(length_kinds)),
            arrivals=tuple(dict.fromkeys(arrival_kinds)),
            request_rate=request_rate,
            vocab_size=setup.vocab_size,
            seed=setup.seed,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if objective is not None and "burst" not in plan.arrivals:
        raise click.UsageError("--slo starts from the rate of a burst: add --arrivals burst")
    runs = measure_rounds(setup, plan, rounds)
    results = summarize_policies(plan, runs)
    probes: dict[Mode, list[Probe]] = {}
    if objective is not None:
        # The last burst is of the lengths that the search takes, too.
        burst = [result for result in results if result.workload.arrivals == "burst"][-1]
        start_rate = max(figures.requests_per_s for figures in burst.modes.values())
        search = RateSearch(
            objective=objective, probe_seconds=probe_seconds, probe_batches=probe_batches
        )
        probes = search_rates(setup, plan, search, start_rate)
    print_rows(setup.console, ROW_HEADINGS, policy_rows(results))
    for text in ideal_lines(results):
        setup.console.print(text, markup=False, highlight=False)
    if probes:
        print_rows(setup.console, PROBE_HEADINGS, probe_rows(probes))
    verdicts = [*policy_verdicts(results), *objective_verdicts(probes)]
    print_verdicts(setup.console, verdicts)
    if output_svg is not None:
        output_svg.parent.mkdir(parents=True, exist_ok=True)
        panels = policy_panels(plan, results, runs, probes)
        output_svg.write_text(
            draw_figure(f"Batching policies, batch size {batch_size}", panels), encoding="utf-8"
        )
    settings = {
        **asdict(plan),
        "rounds": rounds,
        "slo": None if objective is None else asdict(objective),
    }
    document = policy_document(results, runs, probes)
    setup.finish(settings, {**document, "verdicts": [asdict(verdict) for verdict in verdicts]})
