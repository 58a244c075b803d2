"""`make bench`: start a server of this checkout, measure it, stop it.

Arguments after `--` go to `headrace serve`; the others to `headrace bench serve`.
"""

import sys
from collections.abc import Sequence

import click

from bench.serve import serve
from bench.server_process import ServerFailed, find_headrace, running_server

__all__ = ["main", "split_arguments"]

STARTUP_TIMEOUT_S = 900.0


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments before and after the first "--"."""
    if "--" not in arguments:
        return list(arguments), []
    position = list(arguments).index("--")
    return list(arguments[:position]), list(arguments[position + 1 :])


def main(arguments: Sequence[str]) -> int:
    """Run, and return the exit code of the measurement."""
    bench_arguments, serve_arguments = split_arguments(arguments)
    try:
        command = [find_headrace(), "serve", *serve_arguments]
        with running_server(command, startup_timeout_s=STARTUP_TIMEOUT_S) as server:
            result: object = serve.main(
                ["--url", server.url, *bench_arguments], standalone_mode=False
            )
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except ServerFailed as error:
        click.echo(f"Error: {error}", err=True)
        return 1
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
