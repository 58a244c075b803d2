"""`headrace chat` and `headrace complete`: a conversation in the terminal, or one answer."""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Unpack

import click

from headrace_client.client import DEFAULT_URL, AsyncClient
from headrace_client.errors import HeadraceError
from headrace_client.messages import ChatMessage, GenerationOptions
from headrace_client.stream import Stream

with contextlib.suppress(ImportError):  # not on every system
    import readline  # noqa: F401 (gives `input` editing and history)

__all__ = ["chat", "complete"]

HELP = """\
  /reset   forget the conversation
  /stats   numbers of this session
  /help    this list
  /quit    leave (so does Ctrl-D)
  Ctrl-C   stop the answer"""


def _checked_url(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    """Callback of --url."""
    try:
        AsyncClient(value)  # connects to nothing yet
    except ValueError:
        raise click.BadParameter(f"{value!r} does not look like {DEFAULT_URL}") from None
    return value


def _readable(text: str) -> str:
    """Replace bytes of the terminal that are not in its encoding; JSON could not carry them."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def _shared_options[F: Callable[..., object]](command: F) -> F:
    """Add the options that both commands take."""
    for option in reversed(
        (
            click.option(
                "--url",
                default=DEFAULT_URL,
                show_default=True,
                callback=_checked_url,
                help="Address of the server.",
            ),
            click.option(
                "--api-key",
                envvar="HEADRACE_API_KEY",
                help="Key for a server that wants one; better in HEADRACE_API_KEY.",
            ),
            click.option("--model", help="Name of the model; by default the one that is served."),
            click.option("--temperature", type=float, help="0 always takes the likeliest token."),
            click.option("--top-p", type=float, help="Keep the likeliest tokens up to this share."),
            click.option("--max-tokens", type=int, help="Longest answer, in tokens."),
            click.option(
                "--seed",
                type=click.IntRange(-(2**63), 2**64 - 1),
                help="The same seed gives the same answer.",
            ),
            click.option("--priority", type=int, help="Lower goes first; default 0."),
            click.option("--tenant", help="On whose behalf; tenants share the server fairly."),
            click.option("--cache-salt", help="Share cached prompts with equal salts only."),
            click.option("--queue-timeout", type=float, help="Seconds to wait for the start."),
            click.option("--deadline", type=float, help="Seconds after which the answer ends."),
        )
    ):
        command = option(command)
    return command


@click.command()
@_shared_options
@click.option("--system", help="Instruction that goes before the conversation.")
def chat(
    url: str,
    system: str | None,
    api_key: str | None = None,
    **options: Unpack[GenerationOptions],
) -> None:
    """Talk to a server.

    In a terminal this is a conversation. Otherwise each line of standard input is a question of
    its own, and its answer goes to standard output.
    """
    session = _Session(url=url, api_key=api_key, system=system, options=options)
    if sys.stdin.isatty():
        session.converse()
    else:
        session.answer_lines()


@click.command()
@_shared_options
@click.argument("prompt")
def complete(
    url: str, prompt: str, api_key: str | None = None, **options: Unpack[GenerationOptions]
) -> None:
    """Continue the text PROMPT; "-" reads it from standard input."""
    text = sys.stdin.read() if prompt == "-" else prompt
    try:
        answer = asyncio.run(
            _answer(url, api_key, lambda client: client.complete(_readable(text), **options))
        )
    except HeadraceError as error:
        raise click.ClickException(str(error)) from None
    _print_numbers(answer)


@dataclass(slots=True)
class _Answer:
    """What is left of a stream when it is over."""

    text: str
    stream: Stream


@dataclass(slots=True)
class _Session:
    """One run of `headrace chat`."""

    url: str
    api_key: str | None
    system: str | None
    options: GenerationOptions
    history: list[ChatMessage] = field(default_factory=list)
    num_answers: int = 0
    num_tokens: int = 0
    generation_s: float = 0.0

    def converse(self) -> None:
        """Prompt, answer, and so on, until the user leaves."""
        self._greet()
        wants_more = True
        while wants_more:
            try:
                wants_more = self._take_line()
            except KeyboardInterrupt:
                with contextlib.suppress(KeyboardInterrupt):
                    click.echo()

    def _take_line(self) -> bool:
        """Read one line and do what it says; return False to leave."""
        try:
            line = _readable(input("> ")).strip()
        except EOFError:
            click.echo()
            return False
        match line:
            case "":
                pass
            case "/quit" | "/exit":
                return False
            case "/reset":
                self.history.clear()
                _dim("The conversation begins anew.")
            case "/stats":
                self._print_stats()
            case "/help":
                _dim(HELP)
            case _ if line.startswith("/"):
                _dim(f"Unknown command {line.split()[0]}; /help lists them.")
            case _:
                self._take_turn(line)
        return True

    def answer_lines(self) -> None:
        """Answer each line of standard input on its own; stop at the first that fails."""
        for line in sys.stdin:
            question = _readable(line).strip()
            if question == "/quit":
                return
            if question:
                try:
                    _print_numbers(self._ask([{"role": "user", "content": question}]))
                except HeadraceError as error:
                    raise click.ClickException(str(error)) from None

    def _greet(self) -> None:
        async def hello() -> str:
            async with AsyncClient(self.url, api_key=self.api_key) as client:
                return (await client.hello()).model

        try:
            model = asyncio.run(hello())
        except HeadraceError as error:
            raise click.ClickException(str(error)) from None
        _dim(f"{model} at {self.url}. /help lists the commands.")

    def _take_turn(self, line: str) -> None:
        self.history.append({"role": "user", "content": line})
        try:
            answer = self._ask(self.history)
        except (HeadraceError, KeyboardInterrupt) as error:
            self.history.pop()
            click.echo()
            if isinstance(error, HeadraceError):
                click.secho(f"Error: {error}", fg="red", err=True)
            return
        self.history.append({"role": "assistant", "content": answer.text})
        _print_numbers(answer)

    def _ask(self, turns: list[ChatMessage]) -> _Answer:
        head: list[ChatMessage] = []
        if self.system is not None:
            head.append({"role": "system", "content": _readable(self.system)})
        # A connection of its own for each answer: while the user types, nothing runs that could
        # answer the server's heartbeat, and a server that was restarted does not matter.
        answer = asyncio.run(
            _answer(
                self.url,
                self.api_key,
                lambda client: client.chat([*head, *turns], **self.options),
            )
        )
        usage, timing = answer.stream.usage, answer.stream.timing
        self.num_answers += 1
        self.num_tokens += usage.completion_tokens if usage else 0
        self.generation_s += timing.e2e_s if timing else 0.0
        return answer

    def _print_stats(self) -> None:
        rate = self.num_tokens / self.generation_s if self.generation_s else 0.0
        turns = len(self.history) // 2
        _dim(
            f"{self.num_answers} answers, {self.num_tokens} tokens, {rate:.1f} tok/s over all; "
            f"{turns} turns in this conversation"
        )


async def _answer(
    url: str, api_key: str | None, start: Callable[[AsyncClient], Awaitable[Stream]]
) -> _Answer:
    """Print an answer as it comes. Ctrl-C ends the answer; a second one raises."""
    pieces: list[str] = []
    async with (
        AsyncClient(url, api_key=api_key) as client,
        await _started(client, start) as stream,
    ):
        try:
            await _print_deltas(stream, pieces)
        except asyncio.CancelledError:
            # asyncio.run makes this of Ctrl-C. The server still says what it has done so far.
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            stream.cancel()
            await _print_deltas(stream, pieces)
        finally:
            click.echo()
    return _Answer(text="".join(pieces), stream=stream)


async def _started(
    client: AsyncClient, start: Callable[[AsyncClient], Awaitable[Stream]]
) -> Stream:
    try:
        return await start(client)
    except (TypeError, ValueError) as error:  # a value that cannot be sent, such as NaN
        raise click.UsageError(str(error)) from None


async def _print_deltas(stream: Stream, pieces: list[str]) -> None:
    async for delta in stream:
        pieces.append(delta.text)
        click.echo(delta.text, nl=False)
        sys.stdout.flush()


def _print_numbers(answer: _Answer) -> None:
    usage, timing = answer.stream.usage, answer.stream.timing
    if usage is None or timing is None:
        return
    parts = [f"{usage.completion_tokens} tokens"]
    if timing.ttft_s is not None:
        parts.append(f"TTFT {timing.ttft_s * 1000:.0f} ms")
    if timing.itl_mean_s:
        parts.append(f"{1 / timing.itl_mean_s:.1f} tok/s")
    if usage.cached_tokens:
        parts.append(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached")
    if answer.stream.finish_reason != "stop":
        parts.append(f"ended by {answer.stream.finish_reason}")
    _dim(" · ".join(parts))


def _dim(text: str) -> None:
    click.secho(text, dim=True, err=True)
