import io

import pytest
from rich.console import Console

from bench.verdict import judge, print_verdicts


@pytest.mark.parametrize(
    ("measured", "bounds", "is_met"),
    [
        (2.0, {"most": 2.0}, True),
        (2.1, {"most": 2.0}, False),
        (0.85, {"least": 0.85}, True),
        (0.84, {"least": 0.85}, False),
        (None, {"most": 2.0}, False),
        (float("nan"), {"most": 2.0}, False),
    ],
)
def test_a_figure_meets_a_demand_up_to_its_bound(
    measured: float | None, bounds: dict, is_met: bool
):
    assert judge("d", measured, **bounds).is_met is is_met


def test_every_demand_is_a_line():
    console = Console(file=io.StringIO(), width=80)
    verdicts = [judge("[at most] 2", 1.23456, most=2), judge("at least 1", None, least=1)]
    print_verdicts(console, verdicts)
    lines = console.file.getvalue().splitlines()
    assert lines == ["met    [at most] 2: 1.235", "MISSED at least 1: not measured"]
