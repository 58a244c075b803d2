import io

from rich.console import Console

from gateway.commands.memory_table import MemoryPart, memory_table

MIB = 1 << 20
PARTS = [
    MemoryPart("weights", 257 * MIB, "bfloat16"),
    MemoryPart("KV cache", 1024 * MIB, "46,592 tokens"),
    MemoryPart("workspace", 512 * 1024, "of the largest step"),
]


def shown(available):
    screen = io.StringIO()
    Console(file=screen, width=100).print(memory_table(PARTS, available=available))
    return [line.rstrip() for line in screen.getvalue().splitlines()]


def test_every_part_has_a_line_and_the_last_one_adds_up():
    assert shown(8192 * MIB) == [
        "  weights    257.0 MiB  bfloat16",
        "  KV cache     1.0 GiB  46,592 tokens",
        "  workspace  512.0 KiB  of the largest step",
        "  memory       1.3 GiB  of 8.0 GiB",
    ]


def test_more_than_there_is_is_said():
    assert shown(1024 * MIB)[-1] == "  memory       1.3 GiB  of 1.0 GiB, more than there is"
