"""Where the memory of a server goes, as a table for the start of its log."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table

from gateway.diagnosis import format_bytes

__all__ = ["MemoryPart", "memory_table"]


class MemoryPart(NamedTuple):
    """Something that takes memory, its size in bytes, and what it consists of."""

    name: str
    size: int
    details: str


def memory_table(parts: Sequence[MemoryPart], *, available: int) -> Table:
    """Return a line for each part and one for all of them, with what the machine has.

    Args:
        parts: all that is known to take memory.
        available: memory of the machine in bytes.
    """
    total = sum(part.size for part in parts)
    whole = f"of {format_bytes(available)}"
    if total > available:
        whole += ", more than there is"
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(overflow="fold")
    for part in (*parts, MemoryPart("memory", total, whole)):
        table.add_row(f"  {part.name}", format_bytes(part.size), part.details)
    return table
