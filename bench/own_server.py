"""What the commands share that start `headrace serve` themselves.

Their options, the start and stop of a server, the result file, and what counts as a failure.
"""

import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from pathlib import Path
from typing import IO, Any

import click
from rich.console import Console

from bench.environment import describe_environment, without_folder
from bench.report import open_console, write_json
from bench.scenario import Sender
from bench.server_process import ServerFailed, ServerProcess, find_headrace, running_server
from bench.stream import RequestFailed, RequestRecord
from bench.target import Target, find_model, open_session
from gateway.event_loop import loop_factory

__all__ = ["BenchSetup", "measuring_command"]

LAST_WORDS = 3000  # characters of a failed server's output


class BenchSetup:
    """What a measuring command works with.

    Attributes:
        model: to serve; None for the built-in one.
        serve_arguments: further ones for `headrace serve`.
        seed: of everything that is drawn.
        vocab_size: token ids of prompts are below it.
        startup_timeout_s: after which a start has failed.
        timeout_s: of silence, after which a request has failed.
        console: for results.
        progress: for lines that say what goes on.
    """

    def __init__(
        self,
        *,
        name: str,
        model: str | None,
        serve_arguments: Sequence[str],
        seed: int,
        vocab_size: int,
        startup_timeout_s: float,
        timeout_s: float,
        output_json: Path | None,
    ) -> None:
        self.model = model
        self.serve_arguments = serve_arguments
        self.vocab_size = vocab_size
        self.seed = seed
        self.startup_timeout_s = startup_timeout_s
        self.timeout_s = timeout_s
        self.console = open_console()
        self.progress = Console(stderr=True, highlight=False, soft_wrap=True)
        self._name = name
        self._arguments = [*([model] if model else []), *serve_arguments]
        self._output_json = output_json
        self._failures: Counter[str] = Counter()
        self._example: str | None = None

    def measure[Result](
        self, flags: Sequence[str], work: Callable[[Sender], Awaitable[Result]]
    ) -> Result:
        """Start a server with further flags, work with it, and stop it.

        Raises:
            click.ClickException: it did not start or stop as it should, or cannot be reached.
        """
        return self.measure_together([flags], lambda senders: work(senders[0]))

    def measure_together[Result](
        self,
        flags: Sequence[Sequence[str]],
        work: Callable[[Sequence[Sender]], Awaitable[Result]],
    ) -> Result:
        """Do as `measure` does with several servers at once, each with flags of its own."""
        with tempfile.TemporaryFile("w+") as output:
            try:
                with ExitStack() as servers:
                    urls = [servers.enter_context(self._server(own, output)).url for own in flags]
                    return asyncio.run(self._work(urls, work), loop_factory=loop_factory())
            except (ServerFailed, RequestFailed) as error:
                output.seek(0)
                words = output.read()[-LAST_WORDS:]
                raise click.ClickException(f"{error}\nIts last words:\n{words}") from error

    def _server(
        self, flags: Sequence[str], output: IO[str]
    ) -> AbstractContextManager[ServerProcess]:
        arguments = [*self._arguments, *flags]
        self.progress.print(f"headrace serve {' '.join(arguments)}", markup=False)
        return running_server(
            [find_headrace(), "serve", *arguments],
            startup_timeout_s=self.startup_timeout_s,
            output=output,
        )

    async def _work[Result](
        self, urls: Sequence[str], work: Callable[[Sequence[Sender]], Awaitable[Result]]
    ) -> Result:
        async with open_session(None, self.timeout_s) as session:
            models = [await find_model(session, url) for url in urls]
            return await work(
                [
                    Sender(session, Target(url=url, model=model["id"]), model)
                    for url, model in zip(urls, models, strict=True)
                ]
            )

    def check(self, records: Iterable[RequestRecord], *, expected: Sequence[str] = ()) -> None:
        """Note every request that failed, unless by one of the expected kinds."""
        for record in records:
            if record.error is not None and record.error not in expected:
                self.note_failures({record.error: 1}, record.error_detail)

    def note_failures(self, kinds: Mapping[str, int], example: str | None) -> None:
        """Note what failed: how often, by kind, and what one of them said."""
        self._failures.update(kinds)
        self._example = self._example or example

    def finish(self, settings: Mapping[str, Any], results: Mapping[str, Any]) -> None:
        """Write the result file, and end with exit code 1 if a request failed unexpectedly."""
        if self._output_json is not None:
            document = {
                "schema": f"headrace.bench.{self._name}/1",
                "environment": describe_environment(sys.argv),
                "serve_arguments": [without_folder(word) for word in self._arguments],
                "settings": {"seed": self.seed, **settings},
                **results,
                "failures": dict(self._failures),
            }
            write_json(self._output_json, document)
        if self._failures:
            kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(self._failures.items()))
            raise click.ClickException(f"requests failed ({kinds}); first: {self._example}")


def measuring_command(
    *, quick: Mapping[str, Any]
) -> Callable[[Callable[..., None]], click.Command]:
    """Make a click command of a function, with the options that all of these commands share.

    Args:
        quick: other defaults of its options, by parameter name, that --quick chooses: a smoke run.

    Returns:
        A decorator; the function gets `setup` besides its own options.
    """

    def choose_quick(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value:
            ctx.default_map = {**(ctx.default_map or {}), **quick}

    def decorate(function: Callable[..., None]) -> click.Command:
        @wraps(function)
        def run(
            *,
            model: str | None,
            seed: int,
            vocab_size: int,
            startup_timeout_s: float,
            timeout_s: float,
            output_json: Path | None,
            serve_arguments: tuple[str, ...],
            **options: Any,
        ) -> None:
            setup = BenchSetup(
                name=function.__name__,
                model=model,
                serve_arguments=serve_arguments,
                seed=seed,
                vocab_size=vocab_size,
                startup_timeout_s=startup_timeout_s,
                timeout_s=timeout_s,
                output_json=output_json,
            )
            function(setup, **options)

        for decorator in reversed(
            (
                click.option("--model", help="To serve; by default the built-in one."),
                click.option("--seed", type=int, default=0, show_default=True),
                click.option(
                    "--vocab-size",
                    type=click.IntRange(2),
                    default=30_000,
                    show_default=True,
                    help="Token ids of prompts are below it.",
                ),
                click.option(
                    "--quick",
                    is_flag=True,
                    is_eager=True,
                    expose_value=False,
                    callback=choose_quick,
                    help="Smaller defaults: shows that it works, not how fast.",
                ),
                click.option(
                    "--startup-timeout",
                    "startup_timeout_s",
                    type=float,
                    default=900.0,
                    show_default=True,
                    help="Seconds after which a start has failed.",
                ),
                click.option(
                    "--timeout",
                    "timeout_s",
                    type=float,
                    default=1200.0,
                    show_default=True,
                    help="Seconds of silence after which a request has failed.",
                ),
                click.option(
                    "--output-json",
                    type=click.Path(path_type=Path, dir_okay=False),
                    help="Result file.",
                ),
                click.argument("serve_arguments", nargs=-1, type=click.UNPROCESSED),
            )
        ):
            run = decorator(run)
        return click.command(context_settings={"ignore_unknown_options": True})(run)

    return decorate
