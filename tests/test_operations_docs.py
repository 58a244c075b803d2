"""docs/operations.md names every metric, and no other; every option that it names exists."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from gateway.commands.serve_options import ServeOptions
from gateway.metrics import VLLM_NAMES, Metrics
from jaxengine.stats import EngineStats

TEXT = (Path(__file__).parents[1] / "docs" / "operations.md").read_text(encoding="utf-8")


def metric_rows() -> list[tuple[str, list[str], str]]:
    """Kind, names and marks of each row of the section about metrics."""
    section = TEXT.split("\n## Metrics\n")[1].split("\n## ")[0]
    kind, rows = "", []
    for line in section.splitlines():
        if match := re.match(r"\| (histogram|gauge|counter) \|", line):
            kind = match[1]
        elif line.startswith("| `"):
            _, names, marks, *_ = line.split("|")
            rows.append((kind, re.findall(r"`(\w+)`", names), marks))
    return rows


def exported() -> dict[str, str]:
    """Kind of each metric by its name without prefix."""
    metrics = Metrics("m")
    metrics.watch_engine(EngineStats)
    families = text_string_to_metric_families(metrics.render()[0].decode())
    return {
        family.name.removeprefix("headrace_")
        + ("_total" if family.type == "counter" else ""): family.type
        for family in families
        if not family.name.endswith("_created")
    }


def test_every_metric_is_described_and_each_description_has_a_metric():
    described = [(name, kind) for kind, names, _ in metric_rows() for name in names]
    assert sorted(described) == sorted(exported().items())


def test_those_marked_v_are_the_ones_that_have_a_name_of_vllm():
    marked = {
        name.removesuffix("_total")
        for _, names, marks in metric_rows()
        if "v" in marks.split()
        for name in names
    }
    assert marked == set(VLLM_NAMES)


def test_every_option_that_is_named_exists():
    named = set(re.findall(r"--[a-z][a-z-]+", TEXT.split("\n## Measuring\n")[0]))
    options = {"--" + name.replace("_", "-") for name in ServeOptions.__annotations__}
    assert named <= options | {"--help"}
