"""`headrace bench scheduler`: what a step costs the host, whoever waits."""

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from bench.environment import describe_environment
from bench.report import write_json
from bench.simulation.engine_sizes import SCHEDULING_POLICIES
from bench.simulation.scheduler_cost import StepCost, measure_step_cost

__all__ = ["scheduler"]

RESULT_SCHEMA = "headrace.bench.scheduler/1"
DEMANDED_MS = 3.0


def parse_counts(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[int, ...]:
    """Turn "0,1000" into numbers."""
    try:
        counts = tuple(int(word) for word in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 0,1000") from None
    if min(counts) < 0:
        raise click.BadParameter("a number of requests cannot be negative")
    return counts


def make_cost_table(costs: list[StepCost]) -> Table:
    """One row for each number of waiting requests."""
    table = Table(header_style="bold")
    for heading in ("running", "waiting", "schedule ms", "update ms", "step ms", "p99", "add us"):
        table.add_column(heading, justify="right")
    for cost in costs:
        table.add_row(
            str(cost.num_running),
            str(cost.num_waiting),
            f"{cost.schedule_ms:.2f}",
            f"{cost.update_ms:.2f}",
            f"{cost.step_ms:.2f}",
            f"{cost.step_p99_ms:.2f}",
            f"{cost.add_us:.1f}",
        )
    return table


@click.command()
@click.option("--running", type=click.IntRange(min=1), default=1000, show_default=True)
@click.option(
    "--waiting",
    callback=parse_counts,
    default="0,1000,100000",
    show_default=True,
    help="Numbers of waiting requests, measured one after the other.",
)
@click.option("--steps", type=click.IntRange(min=1), default=200, show_default=True)
@click.option(
    "--scheduling-policy",
    "policy",
    type=click.Choice(SCHEDULING_POLICIES),
    default="fair",
    show_default=True,
)
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False), help="Result file.")
def scheduler(
    running: int, waiting: tuple[int, ...], steps: int, policy: str, output_json: Path | None
) -> None:
    """Measure the host time of one scheduling step: schedule and update, without a device."""
    costs = [
        measure_step_cost(
            num_running=running,
            num_waiting=num_waiting,
            num_steps=steps,
            policy=next(name for name in SCHEDULING_POLICIES if name == policy),
        )
        for num_waiting in waiting
    ]
    console = Console()
    console.print(make_cost_table(costs))
    worst_ms = max(cost.step_ms for cost in costs)
    verdict = "under" if worst_ms < DEMANDED_MS else "NOT under"
    console.print(f"A step takes at most {worst_ms:.2f} ms, {verdict} {DEMANDED_MS:g} ms.")
    if output_json is not None:
        document = {
            "schema": RESULT_SCHEMA,
            "environment": describe_environment(sys.argv),
            "scheduling_policy": policy,
            "costs": [cost.as_dict() for cost in costs],
        }
        write_json(output_json, document)
