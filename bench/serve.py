"""`headrace bench serve`: load any OpenAI-compatible server and say how it bore it."""

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bench.measurement import BenchPlan, make_document, measure
from bench.report import print_summaries, write_json
from bench.stream import RequestFailed
from bench.summary import Goodput, LoadLevel
from bench.target import Target
from bench.workload import PromptKind, WorkloadConfig
from gateway.event_loop import loop_factory

__all__ = ["serve"]


def parse_concurrency(
    _ctx: click.Context, _param: click.Parameter, value: str | None
) -> tuple[int, ...]:
    """Turn "1,8,32" into numbers."""
    if value is None:
        return ()
    try:
        numbers = tuple(int(word) for word in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 1,8,32") from None
    if min(numbers) < 1:
        raise click.BadParameter("a concurrency must be at least 1")
    return numbers


def parse_goodput(
    _ctx: click.Context, _param: click.Parameter, value: str | None
) -> Goodput | None:
    """Turn "ttft:500,itl:50" into demands."""
    try:
        return None if value is None else Goodput.parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server.")
@click.option("--model", default="", help="Model name to send; by default the first it lists.")
@click.option(
    "--endpoint",
    type=click.Choice(["completions", "chat"]),
    default="completions",
    show_default=True,
)
@click.option(
    "--concurrency",
    callback=parse_concurrency,
    help="Closed loop: so many requests in flight; a list measures one after the other. "
    "Default: 1,8,32,64 unless --request-rate is given.",
)
@click.option(
    "--request-rate",
    type=click.FloatRange(min=0, min_open=True),
    multiple=True,
    help="Open loop: so many arrivals per second. May be repeated.",
)
@click.option(
    "--burstiness",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Shape of the gaps between arrivals: 1 is Poisson, less is burstier.",
)
@click.option("--num-prompts", type=click.IntRange(min=1), help="Requests per level.")
@click.option("--num-warmups", type=click.IntRange(min=0), help="Uncounted requests before each.")
@click.option("--input-len", type=int, default=128, show_default=True, help="Prompt tokens.")
@click.option("--output-len", type=int, default=64, show_default=True, help="Tokens asked for.")
@click.option(
    "--shared-prefix-len",
    type=int,
    default=0,
    show_default=True,
    help="First prompt tokens that are the same in every prompt.",
)
@click.option(
    "--prompt-kind",
    type=click.Choice(["tokens", "text"]),
    help="Token ids, or words (--input-len then counts words). Default: tokens, for chat text.",
)
@click.option("--vocab-size", type=int, default=30000, show_default=True, help="Ids are below.")
@click.option("--min-token-id", type=int, default=1000, show_default=True, help="Lowest id.")
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    show_default=True,
    help="Ask for exactly --output-len tokens.",
)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option(
    "--continuous-usage/--no-continuous-usage",
    default=True,
    show_default=True,
    help="Ask for exact token counts in every chunk.",
)
@click.option(
    "--seed",
    type=int,
    help="Of prompts and arrivals. By default a new one each time, so "
    "that a second run does not find the prompts of the first in a prefix cache.",
)
@click.option("--goodput", callback=parse_goodput, help="Demands in ms, such as ttft:500,itl:50.")
@click.option("--api-key", envvar="HEADRACE_API_KEY", help="Sent as a bearer token.")
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    default=600.0,
    show_default=True,
    help="Seconds of silence after which a request has failed.",
)
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False), help="Result file.")
@click.option("--save-requests", is_flag=True, help="Put every request into the result file.")
@click.pass_context
def serve(
    ctx: click.Context,
    *,
    url: str,
    model: str,
    endpoint: Any,
    concurrency: tuple[int, ...],
    request_rate: tuple[float, ...],
    burstiness: float,
    num_prompts: int | None,
    num_warmups: int | None,
    input_len: int,
    output_len: int,
    shared_prefix_len: int,
    prompt_kind: PromptKind | None,
    vocab_size: int,
    min_token_id: int,
    ignore_eos: bool,
    temperature: float,
    continuous_usage: bool,
    seed: int | None,
    goodput: Goodput | None,
    api_key: str | None,
    timeout_s: float,
    output_json: Path | None,
    save_requests: bool,
) -> None:
    """Measure a server: throughput and latencies under load.

    TTFT ends at the first read that brings a token (a role chunk does not). ITL is time per
    token: a chunk that brings n tokens after a gap counts as n gaps of an n-th. In an open loop
    the time of a request starts when it was due. Exit code 1 if a request failed.
    """
    if endpoint == "chat" and prompt_kind == "tokens":
        raise click.UsageError("--endpoint chat takes messages, so --prompt-kind must be text")
    if concurrency and request_rate:
        raise click.UsageError(
            "--concurrency (closed loop) and --request-rate (open loop) exclude each other"
        )
    if not concurrency and not request_rate:
        concurrency = (1, 8, 32, 64)
    try:
        workload = WorkloadConfig(
            kind=prompt_kind or ("text" if endpoint == "chat" else "tokens"),
            input_len=input_len,
            output_len=output_len,
            shared_prefix_len=shared_prefix_len,
            min_token_id=min_token_id,
            vocab_size=vocab_size,
            seed=time.time_ns() % 2**32 if seed is None else seed,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    plan = BenchPlan(
        target=Target(
            url=url,
            model=model,
            endpoint=endpoint,
            api_key=api_key,
            ignore_eos=ignore_eos,
            continuous_usage=continuous_usage,
            temperature=temperature,
        ),
        workload=workload,
        levels=(
            *(LoadLevel(concurrency=number) for number in concurrency),
            *(LoadLevel(request_rate=rate, burstiness=burstiness) for rate in request_rate),
        ),
        num_prompts=num_prompts,
        num_warmups=num_warmups,
        timeout_s=timeout_s,
        goodput=goodput,
    )
    progress = Console(stderr=True)
    try:
        plan, server, results = asyncio.run(measure(plan, progress), loop_factory=loop_factory())
    except RequestFailed as error:
        raise click.ClickException(f"{url}: {error}") from None
    summaries = [result.summary for result in results]
    print_summaries(Console(), summaries)
    if output_json is not None:
        document = make_document(plan, server, results, sys.argv, with_requests=save_requests)
        write_json(output_json, document)
    if any(summary.num_failed for summary in summaries):
        ctx.exit(1)
