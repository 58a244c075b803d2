"""`headrace bench startup`: how long from the start of the process until the server is ready.

Cold has an empty folder for compiled programs, warm one that the run before has filled. The model
is in its cache and in the page cache of the system both times: what is measured is loading and
compiling. The server's Python keeps its bytecode, as it does unless told otherwise.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import IO

import click
from rich.console import Console
from rich.table import Table

from bench.environment import describe_environment
from bench.report import write_json
from bench.server_process import ServerFailed, ServerProcess, find_headrace, running_server

__all__ = ["StartupTimes", "measure_startup", "startup"]

RESULT_SCHEMA = "headrace.bench.startup/1"

# Starts a server that keeps compiled programs in this folder, stops it, says how long it took.
type StartOnce = Callable[[Path], ServerProcess]


@dataclass(frozen=True, slots=True)
class StartupTimes:
    """Seconds of each repetition.

    Attributes:
        listening_s: until the server said which port it has.
        ready_s: until /ready answered 200.
    """

    listening_s: list[float]
    ready_s: list[float]


def measure_startup(start_once: StartOnce, repeats: int) -> dict[str, StartupTimes]:
    """Start a server `repeats` times cold and as often warm.

    Args:
        start_once: starts a server with a folder for compiled programs, and stops it.
        repeats: of each kind; every cold start has a folder of its own, which a warm one follows.

    Returns:
        The times by "cold" and "warm".
    """
    times = {kind: StartupTimes([], []) for kind in ("cold", "warm")}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="headrace-compiled-") as folder:
            for kind in ("cold", "warm"):
                server = start_once(Path(folder))
                times[kind].listening_s.append(server.listening_s)
                times[kind].ready_s.append(server.ready_s)
    return times


def start_and_stop(
    command: Sequence[str], compiled: Path, startup_timeout_s: float, output: IO[str]
) -> ServerProcess:
    """One start of a server."""
    with running_server(
        command,
        startup_timeout_s=startup_timeout_s,
        output=output,
        environment={
            "JAX_COMPILATION_CACHE_DIR": str(compiled),
            "PYTHONDONTWRITEBYTECODE": "",
        },
    ) as server:
        return server


def make_startup_table(times: dict[str, StartupTimes]) -> Table:
    """One row for cold, one for warm."""
    table = Table(header_style="bold")
    for heading in ("start", "ready s (median)", "min", "max", "runs"):
        table.add_column(heading, justify="left" if heading == "start" else "right")
    for kind, entry in times.items():
        table.add_row(
            kind,
            f"{median(entry.ready_s):.2f}",
            f"{min(entry.ready_s):.2f}",
            f"{max(entry.ready_s):.2f}",
            str(len(entry.ready_s)),
        )
    return table


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@click.option(
    "--startup-timeout",
    "startup_timeout_s",
    type=float,
    default=600.0,
    show_default=True,
    help="Seconds after which a start has failed.",
)
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False), help="Result file.")
@click.argument("serve_arguments", nargs=-1, type=click.UNPROCESSED)
def startup(
    repeats: int,
    startup_timeout_s: float,
    output_json: Path | None,
    serve_arguments: tuple[str, ...],
) -> None:
    """Measure the start of `headrace serve`, with and without compiled programs at hand.

    SERVE_ARGUMENTS go to `headrace serve`: a model, or its options.
    """
    with tempfile.TemporaryFile("w+") as output:
        try:
            command = [find_headrace(), "serve", *serve_arguments]
            times = measure_startup(
                lambda compiled: start_and_stop(command, compiled, startup_timeout_s, output),
                repeats,
            )
        except ServerFailed as error:
            output.seek(0)
            click.echo(output.read()[-4000:], err=True)
            raise click.ClickException(str(error)) from None
    Console().print(make_startup_table(times))
    if output_json is not None:
        document = {
            "schema": RESULT_SCHEMA,
            "environment": describe_environment(sys.argv),
            "serve_arguments": serve_arguments,
            "starts": {kind: asdict(entry) for kind, entry in times.items()},
        }
        write_json(output_json, document)
