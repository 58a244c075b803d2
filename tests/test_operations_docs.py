"""docs/operations.md names every metric, and no other; options and metrics on its pages exist."""

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.account_metrics import AccountCollector
from gateway.commands.serve_options import ServeOptions
from gateway.metrics import VLLM_NAMES, Metrics
from jaxengine.stats import EngineStats

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
PAGES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in (ROOT / "docs" / "operations").glob("*.md")
}
# Options of docker, helm, kubectl and of our other commands.
FOREIGN_OPTIONS = set(
    "--build --build-arg --rm --set --from-file --help --admin --file --concurrency "
    "--tenant --tokens-per-minute --max-concurrent-requests --isolation".split()
)


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
    metrics.watch(AccountCollector(list, "m"))
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


def options() -> set[str]:
    """Options of the server, and their opposites where they have some."""
    given = {name.replace("_", "-"): kind for name, kind in ServeOptions.__annotations__.items()}
    opposites = {"--no-" + name for name, kind in given.items() if kind is bool}
    return {"--" + name for name in given} | opposites


def table_rows(text: str) -> list[list[str]]:
    """The cells of every row of every table, without the heads."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_index_leads_to_every_page():
    assert set(re.findall(r"\(operations/([a-z]+)\.md\)", TEXT)) == PAGES.keys()


@pytest.mark.parametrize("page", sorted(PAGES.keys() - {"vllm"}))
def test_every_option_that_a_page_names_exists(page):
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGES[page]))
    assert named <= options() | FOREIGN_OPTIONS


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_metric_that_a_page_names_exists(page):
    named = set(re.findall(r"\bheadrace_(\w+)", PAGES[page]))
    assert named <= exported().keys()


def test_the_table_of_vllms_options_leads_to_options_of_ours():
    rows = table_rows(PAGES["vllm"].split("## Options")[1].split("## Metrics")[0])
    assert len(rows) > 30
    for theirs, ours, _ in rows[1:]:
        assert re.fullmatch(r"(`--[a-z0-9-]+`(, )?)+", theirs)
        named = re.findall(r"--[a-z-]+", theirs if ours == "the same" else ours)
        assert set(named) <= options(), ours
    notes = {name for *_, note in rows for name in re.findall(r"--[a-z-]+", note)}
    assert notes <= options()


def test_the_table_of_vllms_metrics_is_the_one_that_is_exported():
    section = PAGES["vllm"].split("## Metrics")[1].split("| instead |")[0]
    pairs = re.findall(r"\| `vllm:(\w+)` \| `headrace_(\w+)` \|", section)
    names = {ours: theirs for theirs, ours in pairs}
    suffix = {name: "_total" if f"{name}_total" in exported() else "" for name in VLLM_NAMES}
    assert names == {
        ours + suffix[ours]: theirs + suffix[ours] for ours, theirs in VLLM_NAMES.items()
    }


def test_every_code_of_an_error_that_the_failures_name_is_one_of_ours():
    sources = "".join(
        path.read_text(encoding="utf-8")
        for package in ("gateway", "jaxengine")
        for path in (ROOT / package).rglob("*.py")
    )
    codes = [
        code
        for symptom, *_ in table_rows(PAGES["failures"])
        if re.match(r"[45]\d\d", symptom)
        for code in re.findall(r"`(\w+)`", symptom)
    ]
    assert len(codes) > 10
    for code in codes:
        assert f'"{code}"' in sources, code
