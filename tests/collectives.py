"""What devices exchange in a compiled program, read from its text."""

import re
from collections import Counter

COLLECTIVES = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)


def count_collectives(program: str) -> Counter[str]:
    """Return how often each collective is in the text of a program."""
    return Counter(COLLECTIVES.findall(program))
