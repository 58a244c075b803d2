"""The `headrace` command: a table of commands, each imported only when it is called.

`pip install headrace` brings the client and no JAX, so this module imports nothing beyond click.

Exit codes:
    0: done.
    1: the command failed; one line on stderr says why.
    2: the command line was wrong.
    130: interrupted.
"""

import gc
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import click

__all__ = ["COMMANDS", "SERVE_EXTRA_MODULES", "CommandEntry", "LazyGroup", "headrace", "main"]

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

# What the extra `serve` of pyproject.toml brings, by import name. A test compares the two.
SERVE_EXTRA_MODULES = frozenset(
    {
        "flax",
        "huggingface_hub",
        "jax",
        "jaxtyping",
        "jinja2",
        "llguidance",
        "ml_dtypes",
        "msgspec",
        "numpy",
        "prometheus_client",
        "safetensors",
        "tokenizers",
        "uvloop",
    }
)

OUR_PACKAGES = frozenset({"bench", "gateway", "headrace_client", "jaxengine", "kernels_pallas"})


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """Where a command lives.

    Attributes:
        target: "module:attribute" of a `click.Command`.
        summary: its line in `headrace --help`, here so that showing it imports nothing.
    """

    target: str
    summary: str


COMMANDS: Mapping[str, CommandEntry] = {
    "serve": CommandEntry("gateway.commands.serve:serve", "Serve a model."),
    "chat": CommandEntry("headrace_client.cli:chat", "Talk to a server in the terminal."),
    "complete": CommandEntry("headrace_client.cli:complete", "Complete one prompt on a server."),
    "keys": CommandEntry("gateway.commands.keys:keys", "Make, list and revoke API keys."),
    "models": CommandEntry("gateway.commands.models:models", "List, fetch and locate models."),
    "doctor": CommandEntry(
        "gateway.commands.doctor:doctor", "Say what this machine can run, and why."
    ),
    "bench": CommandEntry("bench.cli:bench", "Measure a server, or the start of one."),
}


def load_command(target: str) -> click.Command:
    """Import the command behind "module:attribute".

    Raises:
        click.ClickException: a package of the extra `serve` is not installed.
        ImportError: anything else that is wrong with the import; that is a bug, and shows as one.
    """
    module_name, _, attribute = target.partition(":")
    # Nothing of what is imported is garbage, and looking for some takes a fifth of the time.
    gc.disable()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        # A package that is there but lacks a submodule is broken, not missing.
        if missing not in SERVE_EXTRA_MODULES or importlib.util.find_spec(missing) is not None:
            raise
        raise click.ClickException(
            f"this command needs {missing}, which is not installed: pip install 'headrace[serve]'"
        ) from error
    finally:
        gc.freeze()
        gc.enable()
    command = getattr(module, attribute)
    if not isinstance(command, click.Command):
        raise TypeError(f"{target} is a {type(command).__name__}, not a command")
    return command


class LazyGroup(click.Group):
    """A click group whose commands are imported when they are called, and not for the help page."""

    def __init__(self, *, entries: Mapping[str, CommandEntry], **attributes: object) -> None:
        super().__init__(**attributes)  # type: ignore[arg-type]  # click's own keywords
        self._entries = entries

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self._entries.get(cmd_name)
        return None if entry is None else load_command(entry.target)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in self._entries.items()])


def installed_version() -> str:
    """The version of the installed distribution."""
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "unknown (not installed)"


def print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    """Callback of --version: print it and end."""
    if value and not ctx.resilient_parsing:
        click.echo(f"headrace {installed_version()}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    entries=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=print_version,
    help="Show the version and exit.",
)
@click.option("--traceback", is_flag=True, help="Show where an error was raised.")
def headrace(traceback: bool) -> None:
    """LLM serving for people who stream.

    Exit codes: 0 done, 1 failed, 2 wrong command line, 130 interrupted.
    """


def is_ours(error: Exception) -> bool:
    """Whether an error is one that we define: expected, and said in one sentence."""
    return type(error).__module__.partition(".")[0] in OUR_PACKAGES


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the entry point of `headrace`.

    Args:
        arguments: without the program's name; None takes them from sys.argv.

    Returns:
        The exit code. Errors of ours end in one line on stderr; bugs keep their traceback.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        # Not standalone: click would end the process with its own exit codes.
        result = headrace.main(arguments, prog_name="headrace", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return EXIT_INTERRUPTED
    except Exception as error:
        if not is_ours(error) or arguments[:1] == ["--traceback"]:
            raise
        click.echo(f"Error: {error}", err=True)
        return EXIT_FAILED
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())
