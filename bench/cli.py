"""`headrace bench`: the measuring commands."""

import click

from bench.serve import serve
from bench.startup import startup

__all__ = ["bench"]


@click.group()
def bench() -> None:
    """Measure a server, or the start of one."""


bench.add_command(serve)
bench.add_command(startup)
