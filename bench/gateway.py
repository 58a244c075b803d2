"""`headrace bench gateway`: what a token costs the event loop on its way to the client."""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console
from rich.table import Table

from bench.bare_send import measure_bare_send
from bench.carrier_load import Carrier
from bench.environment import describe_environment
from bench.gateway_under_test import CONFIG, GatewayFailed, GatewayUnderTest
from bench.paced_engine import paced_engine
from bench.report import write_json
from gateway.event_loop import loop_factory

__all__ = ["gateway"]

RESULT_SCHEMA = "headrace.bench.gateway/1"
DEMANDED_US = 20.0
PROMPT_LEN = 16
VOCAB_SIZE = 4096
EVENT_BYTES = 190  # of a chunk with a token of /v1/completions

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "served": loop_factory(),
    "asyncio": asyncio.new_event_loop,
}


def measure(
    num_streams: int,
    *,
    output_len: int,
    tokens_per_s: float,
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> list[dict[str, Any]]:
    """Return a row for each carrier.

    Raises:
        GatewayFailed: a client could not read its streams.
    """
    step_s = num_streams / tokens_per_s
    make_engine = partial(
        paced_engine,
        num_streams=num_streams,
        prompt_len=PROMPT_LEN,
        output_len=output_len,
        vocab_size=VOCAB_SIZE,
        step_s=step_s,
    )
    config = replace(
        CONFIG,
        ws_max_streams=num_streams,
        max_connections=num_streams + 64,
        max_concurrent_prepares=num_streams,
    )
    bare_us = measure_bare_send(
        num_streams, EVENT_BYTES, num_rounds=min(output_len, 50), interval_s=step_s
    )
    with GatewayUnderTest(make_engine, VOCAB_SIZE, config=config, new_loop=new_loop) as under_test:
        return [
            {
                "through": carrier,
                "streams": num_streams,
                **under_test.measure(carrier, num_streams, PROMPT_LEN, output_len),
                "bare_send_us": bare_us,
            }
            for carrier in get_args(Carrier)
        ]


def make_cost_table(rows: list[dict[str, Any]]) -> Table:
    """One row for each carrier and number of streams."""
    table = Table(header_style="bold")
    for heading in ("through", "streams", "us/token", "of it system", "tokens/message", "one send"):
        table.add_column(heading, justify="left" if heading == "through" else "right")
    for row in rows:
        figures = (row[name] for name in ("loop_us_per_token", "loop_system_us_per_token"))
        table.add_row(
            row["through"],
            str(row["streams"]),
            *("-" if value is None else f"{value:.1f}" for value in figures),
            f"{row['tokens_per_message']:.2f}",
            f"{row['bare_send_us']:.1f}",
        )
    return table


@click.command()
@click.option(
    "--streams",
    type=click.IntRange(min=1),
    multiple=True,
    default=(64, 1000),
    show_default=True,
    help="Streams at the same time; can be repeated.",
)
@click.option("--output-len", type=click.IntRange(min=8), default=200, show_default=True)
@click.option(
    "--tokens-per-s",
    type=click.FloatRange(min=0, min_open=True),
    default=4000.0,
    show_default=True,
    help="Of all streams together; a step takes accordingly long.",
)
@click.option("--loop", type=click.Choice(tuple(LOOPS)), default="served", show_default=True)
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False), help="Result file.")
def gateway(
    streams: tuple[int, ...],
    output_len: int,
    tokens_per_s: float,
    loop: str,
    output_json: Path | None,
) -> None:
    """Measure the gateway's processor time per token, over a device that computes nothing."""
    rows = []
    try:
        for num_streams in streams:
            rows += measure(
                num_streams,
                output_len=output_len,
                tokens_per_s=tokens_per_s,
                new_loop=LOOPS[loop],
            )
    except GatewayFailed as error:
        raise click.ClickException(str(error)) from error
    console = Console()
    console.print(make_cost_table(rows))
    console.print(f"The goal is under {DEMANDED_US:g} us a token.")
    if output_json is not None:
        document = {
            "schema": RESULT_SCHEMA,
            "environment": describe_environment(sys.argv),
            "loop": LOOPS[loop].__module__,
            "tokens_per_s": tokens_per_s,
            "output_len": output_len,
            "rows": rows,
        }
        write_json(output_json, document)
