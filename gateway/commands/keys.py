"""`headrace keys`: make, list and revoke API keys in the file that `headrace serve` reads."""

import sys
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from gateway.api_keys import ApiKey, KeyFileError, hash_of_key, new_key, read_keys, write_keys

__all__ = ["keys"]

RELOAD = "A running server learns of it by SIGHUP."

_file_option = click.option(
    "--file",
    "path",
    required=True,
    envvar="HEADRACE_API_KEYS_FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file of `headrace serve --api-keys-file`; it holds hashes, not keys.",
)


@click.group()
def keys() -> None:
    """Make, list and revoke API keys."""


@keys.command()
@click.argument("name")
@_file_option
@click.option("--tenant", help="Whose requests come with it. [default: NAME]")
@click.option("--weight", type=float, help="Share of that tenant where the others have 1.")
@click.option("--admin", is_flag=True, help="May see metrics, steps and everybody's usage.")
@click.option("--requests-per-minute", type=click.IntRange(1), help="[default: no bound]")
@click.option("--tokens-per-minute", type=click.IntRange(1), help="[default: no bound]")
@click.option("--max-concurrent-requests", type=click.IntRange(1), help="[default: no bound]")
def new(
    name: str,
    path: Path,
    tenant: str | None,
    weight: float | None,
    admin: bool,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    max_concurrent_requests: int | None,
) -> None:
    """Make a key called NAME, print it once, and keep its hash."""
    known = _read(path) if path.exists() else ()
    if any(key.name == name for key in known):
        raise click.ClickException(f"there is a key {name} already; revoke it, or choose a name")
    secret = new_key()
    entry = {
        "name": name,
        "sha256": hash_of_key(secret),
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "tenant": tenant,
        "weight": weight,
        "admin": admin,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent_requests": max_concurrent_requests,
    }
    try:
        key = msgspec.convert(entry, ApiKey)
    except msgspec.ValidationError as error:
        raise click.UsageError(str(error)) from error
    _write(path, [*known, key])
    click.echo(secret)
    click.secho(f"This is the only time it is shown. {RELOAD}", dim=True, err=True)


@keys.command("list")
@_file_option
def list_keys(path: Path) -> None:
    """Show all keys, without what makes them keys."""
    table = Table(box=None)
    for column in ("name", "tenant", "weight", "admin", "limits", "created"):
        table.add_column(column)
    for key in _read(path):
        table.add_row(
            key.name,
            key.tenant_name,
            "" if key.weight is None else f"{key.weight:g}",
            "yes" if key.admin else "",
            _limits(key),
            key.created,
        )
    Console(file=sys.stdout, soft_wrap=True).print(table)


@keys.command()
@click.argument("name")
@_file_option
def revoke(name: str, path: Path) -> None:
    """Remove the key called NAME."""
    known = _read(path)
    rest = [key for key in known if key.name != name]
    if len(rest) == len(known):
        raise click.ClickException(f"there is no key {name} in {path}")
    _write(path, rest)
    click.secho(f"{name} is removed. {RELOAD}", dim=True, err=True)


def _read(path: Path) -> tuple[ApiKey, ...]:
    try:
        return read_keys(path)
    except KeyFileError as error:
        raise click.ClickException(f"{path}: {error}") from error


def _write(path: Path, all_keys: list[ApiKey]) -> None:
    try:
        write_keys(path, all_keys)
    except KeyFileError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from error


def _limits(key: ApiKey) -> str:
    limits = (
        (key.requests_per_minute, "requests/min"),
        (key.tokens_per_minute, "tokens/min"),
        (key.max_concurrent_requests, "at a time"),
    )
    return ", ".join(f"{limit:,} {unit}" for limit, unit in limits if limit is not None)
