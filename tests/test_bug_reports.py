"""docs/bug-reports.md names tests; here they are looked up."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
DOCUMENT = TESTS.parent / "docs" / "bug-reports.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\d+) \|(.*)\|$", TEXT, re.MULTILINE)


def test_the_rows_are_numbered_without_a_gap():
    assert [int(number) for number, _ in ROWS] == list(range(1, 42))


def test_every_row_has_a_test_or_belongs_to_later_work():
    for number, row in ROWS:
        tests = row.split("|")[-1]
        assert "::" in tests or tests.strip().startswith("later: "), number


def test_every_test_that_is_named_exists():
    missing = []
    for path, name in re.findall(r"`([\w/]+\.py)::(\w+)`", TEXT):
        tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        names = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        if name not in names:
            missing.append(f"{path}::{name}")
    assert not missing, "\n".join(missing)
