"""`headrace models`: what models there are by name, fetch one, say where it lies."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from jaxengine.weights.download import ProgressCallback
from jaxengine.weights.source import (
    DEFAULT_ALIAS,
    DownloadProgress,
    cache_dir,
    find_model,
    list_aliases,
    resolve_model,
)

__all__ = ["download_bar", "models"]

STAGES = {
    "waiting": "waiting for another process",
    "downloading": "downloading",
    "verifying": "verifying",
}


@contextmanager
def download_bar(name: str) -> Iterator[ProgressCallback]:
    """Show a download on stderr; yields what `resolve_model` takes as `progress`.

    Nothing is drawn before the first report, so a cached model stays silent.
    """
    bar = Progress(
        TextColumn(f"{name}: {{task.description}}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(file=sys.stderr),
    )
    tasks: dict[str, TaskID] = {}

    def report(progress: DownloadProgress) -> None:
        if not tasks:
            bar.start()
        if progress.stage not in tasks:
            tasks[progress.stage] = bar.add_task(STAGES[progress.stage])
        bar.update(
            tasks[progress.stage],
            completed=min(progress.done_bytes, progress.total_bytes),
            total=progress.total_bytes,
        )

    try:
        yield report
    finally:
        if tasks:
            bar.stop()


@click.group()
def models() -> None:
    """List, fetch and locate models.

    MODEL is a directory (config.json, tokenizer.json, *.safetensors), a .gguf file, a name that
    `list` shows, or a hub id such as owner/name.
    """


@models.command("list")
def list_models() -> None:
    """List the models that have a short name."""
    table = Table("NAME", "SIZE", "LICENCE", "CACHED", "DESCRIPTION", box=None, pad_edge=False)
    for model in list_aliases():
        cached = "yes" if find_model(model.alias) else "no"
        name = f"{model.alias} (default)" if model.alias == DEFAULT_ALIAS else model.alias
        size = f"{model.size_bytes / 1e6:.0f} MB"
        table.add_row(name, size, model.licence, cached, model.description)
    console = Console()
    console.print(table)
    console.print(f"Cache: {cache_dir()}", soft_wrap=True, highlight=False)


@models.command("pull")
@click.argument("model", required=False)
@click.option("--verify", is_flag=True, help="Check the checksum of a cached copy again.")
def pull(model: str | None, verify: bool) -> None:
    """Fetch MODEL (default: smollm2-135m) into the cache, and print where it lies."""
    with download_bar(model or DEFAULT_ALIAS) as progress:
        files = resolve_model(model, progress=progress, verify=verify)
    click.echo(files.path)


@models.command("where")
@click.argument("model", required=False)
def where(model: str | None) -> None:
    """Print where MODEL (default: smollm2-135m) lies; exit 1 if it is not on this machine."""
    files = find_model(model)
    if files is None:
        name = model or DEFAULT_ALIAS
        raise click.ClickException(f"{name} is not on this machine; `headrace models pull {name}`")
    click.echo(files.path)
