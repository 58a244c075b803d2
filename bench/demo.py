"""`make demo`: start a server on a free port, stream one chat, say how fast it was, stop it."""

import asyncio
import sys

import click

from bench.server_process import ServerFailed, find_headrace, running_server
from headrace_client import AsyncClient, HeadraceError, Timing, Usage

__all__ = ["demo", "describe_answer", "stream_chat"]

QUESTION = "What is the capital of France?"
STARTUP_TIMEOUT_S = 900.0  # the first time, the model is downloaded and everything compiled


async def stream_chat(url: str, question: str) -> tuple[Usage | None, Timing | None]:
    """Ask one question over the websocket and write the answer as it comes."""
    async with (
        AsyncClient(url) as client,
        await client.chat(question, temperature=0, max_tokens=128) as stream,
    ):
        async for delta in stream:
            click.echo(delta.text, nl=False)
        click.echo()
        return stream.usage, stream.timing


def describe_answer(usage: Usage | None, timing: Timing | None) -> str:
    """The figures of one answer in one line, as the server measured them."""
    if usage is None or timing is None:
        return "The server gave no figures."
    parts = [f"{usage.prompt_tokens} tokens in, {usage.completion_tokens} out"]
    parts.append(f"queue {1e3 * timing.queue_s:.1f} ms")
    if timing.ttft_s is not None:
        parts.append(f"first token after {1e3 * timing.ttft_s:.1f} ms")
    if timing.itl_mean_s is not None:
        parts.append(f"{1e3 * timing.itl_mean_s:.1f} ms per token")
    parts.append(f"total {1e3 * timing.e2e_s:.0f} ms")
    return " · ".join(parts)


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--question", default=QUESTION, show_default=True)
@click.argument("serve_arguments", nargs=-1, type=click.UNPROCESSED)
def demo(question: str, serve_arguments: tuple[str, ...]) -> None:
    """Show one answer of a server that lives as long as this command.

    SERVE_ARGUMENTS go to `headrace serve`: a model, or its options.
    """
    try:
        command = [find_headrace(), "serve", *serve_arguments]
        with running_server(command, startup_timeout_s=STARTUP_TIMEOUT_S) as server:
            click.echo(f"Ready after {server.ready_s:.1f} s at {server.url}")
            click.echo(f"\n> {question}")
            usage, timing = asyncio.run(stream_chat(server.url, question))
            click.echo(f"\n{describe_answer(usage, timing)}")
    except (ServerFailed, HeadraceError) as error:
        raise click.ClickException(str(error)) from error
    click.echo("Server stopped.")


if __name__ == "__main__":
    sys.exit(demo())
