"""What deploy/ names exists: metrics, options, pinned packages, files.

scripts/check_deploy has the tools themselves (helm, promtool, ...) look at it.
"""

import json
import re
import tomllib
from pathlib import Path

import click
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gateway.commands.serve_options import serve_options
from gateway.metrics import Metrics
from jaxengine.stats import EngineStats

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "headrace"
DASHBOARD = DEPLOY / "grafana" / "headrace.json"
PLAIN_YAML = sorted(path for path in DEPLOY.rglob("*.y*ml") if "templates" not in path.parts)

# Options of docker, pip, kubectl, apt and the like.
FOREIGN_OPTIONS = set(
    "--build --build-arg --from --no-deps --no-install-recommends --require-hashes --only-binary "
    "--system --uid --now --no-create-home --home-dir --interval --timeout --start-period "
    "--retries".split()
)


def text_of(*parts: str) -> str:
    return DEPLOY.joinpath(*parts).read_text(encoding="utf-8")


@click.command()
@serve_options
def serve(**_options: object) -> None:
    """Stand in for `headrace serve`."""


def serve_option_names() -> set[str]:
    return {name for param in serve.params for name in (*param.opts, *param.secondary_opts)}


def series() -> set[str]:
    """Every name that a query may use."""
    metrics = Metrics("m")
    metrics.watch_engine(EngineStats)
    names = set()
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        names.add(family.name + ("_total" if family.type == "counter" else ""))
        if family.type == "histogram":
            names |= {f"{family.name}_{part}" for part in ("bucket", "sum", "count")}
    return names


def queries() -> dict[str, list[str]]:
    """The queries of each panel."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return {
        panel["title"]: [target["expr"] for target in panel["targets"]]
        for panel in panels
        if panel["type"] != "row"
    }


def pins(name: str) -> dict[str, str]:
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


@pytest.mark.parametrize("path", PLAIN_YAML, ids=lambda path: path.name)
def test_yaml_can_be_read(path):
    assert yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("source", [DASHBOARD, DEPLOY / "prometheus" / "alerts.yml"])
def test_every_metric_that_is_queried_is_exported(source):
    named = set(re.findall(r"\bheadrace_\w+", source.read_text(encoding="utf-8")))
    assert named
    assert named <= series()


def test_autoscaling_looks_at_a_gauge_that_is_exported():
    [name] = re.findall(r"metric: \{name: (\w+)\}", text_of("helm/headrace/templates/hpa.yaml"))
    assert name in series()


@pytest.mark.parametrize(
    ("panel", "metric"),
    [
        ("Time to first token", "time_to_first_token_seconds"),
        ("Inter-token latency", "inter_token_latency_seconds"),
        ("End to end", "e2e_request_latency_seconds"),
        ("Token throughput", "generation_tokens_total"),
        ("Running and waiting", "num_requests_running"),
        ("Waiting, by what for", "num_requests_waiting_by_reason"),
        ("KV cache in use", "kv_cache_usage_ratio"),
        ("Prefix cache hits", "prefix_cache_hits_total"),
        ("Preemptions", "preemptions_total"),
        ("Requests refused", "requests_rejected_total"),
        ("Step time", "step_time_seconds"),
        ("Error of the predicted step time", "step_prediction_error_seconds_total"),
    ],
)
def test_the_dashboard_has_a_panel_for_what_matters(panel, metric):
    assert any(f"headrace_{metric}" in query for query in queries()[panel])


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in panels)
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_every_option_that_is_used_exists():
    known = serve_option_names() | FOREIGN_OPTIONS
    for path in filter(Path.is_file, DEPLOY.rglob("*")):
        used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", path.read_text(encoding="utf-8")))
        assert used <= known, path


def test_variables_of_the_service_are_options():
    options = {name.removeprefix("--").replace("-", "_").upper() for name in serve_option_names()}
    text = text_of("systemd/headrace.service")
    named = set(re.findall(r"HEADRACE_([A-Z_]+)=", text)) - {"CACHE"}
    assert named
    assert named <= options


def test_the_dockerfile_uses_the_python_that_the_project_does():
    version = (ROOT / ".python-version").read_text(encoding="ascii").strip()
    assert f"ARG PYTHON={version}\n" in text_of("Dockerfile")
    assert (
        re.findall(r"^FROM (\S+)", text_of("Dockerfile"), re.MULTILINE)
        == ["python:${PYTHON}-slim-bookworm"] * 2
    )


def test_the_dockerfile_installs_as_set_up_does():
    install = "install --no-deps --require-hashes --only-binary :all: -r"
    set_up = (ROOT / "scripts" / "set_up").read_text(encoding="utf-8").replace("--quiet ", "")
    assert install in set_up
    assert text_of("Dockerfile").count(install) == 2


def test_the_dockerfile_copies_what_the_wheel_holds_and_its_context_has_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = {package.partition("/")[0] for package in packages}
    copied = set(re.findall(r"^COPY (\w+) \1$", text_of("Dockerfile"), re.MULTILINE))
    assert copied == needed
    context = set(re.findall(r"^!(\S+)$", text_of("Dockerfile.dockerignore"), re.MULTILINE))
    assert context == needed | {"requirements", "pyproject.toml", "README.md", "LICENSE"}


def test_the_image_runs_as_somebody_without_rights_and_is_asked_for_its_health():
    text = text_of("Dockerfile")
    user = re.findall(r"^USER (\d+):(\d+)$", text, re.MULTILINE)
    assert user == [("10001", "10001")]
    assert "/health" in text.split("HEALTHCHECK")[1].split("\n")[1]


@pytest.mark.parametrize("variant", ["serve", "cuda"])
def test_the_pins_of_the_image_are_those_that_are_tested(variant):
    locked, pinned = pins("lock.txt"), pins(f"{variant}.txt")
    different = {name for name in pinned.keys() & locked.keys() if pinned[name] != locked[name]}
    assert different == set(), "make lock"
    assert variant == "cuda" or pinned.keys() <= locked.keys()


@pytest.mark.parametrize("variant", ["serve", "cuda"])
def test_every_dependency_of_the_server_is_pinned_for_the_image(variant):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["serve"]]
    names = {re.match(r"[\w.-]+", requirement)[0].lower() for requirement in wanted}
    assert names <= pins(f"{variant}.txt").keys(), "make lock"


def test_what_builds_the_wheel_is_pinned_as_tested():
    assert pins("build.txt")["hatchling"] == pins("lock.txt")["hatchling"]


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("compose.yaml", r"stop_grace_period: (\d+)s"),
        ("systemd/headrace.service", r"TimeoutStopSec=(\d+)s"),
    ],
)
def test_who_stops_the_server_waits_longer_than_it_drains(name, pattern):
    [grace_s] = re.findall(pattern, text_of(name))
    [drain_s] = [param.default for param in serve.params if param.name == "shutdown_timeout"]
    assert int(grace_s) > drain_s


def test_a_pod_has_time_for_its_pause_and_its_drain():
    text = text_of("helm/headrace/templates/deployment.yaml")
    assert "add .Values.preStopSleep .Values.shutdownTimeout 15" in text
    assert "--shutdown-timeout={{ .Values.shutdownTimeout }}" in text


def test_each_value_of_the_chart_is_in_its_schema_and_is_used():
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["properties"]
    templates = "".join(
        path.read_text(encoding="utf-8") for path in (CHART / "templates").iterdir()
    )
    for name, value in values.items():
        assert name in schema
        assert f".Values.{name}" in templates, name
        inner = schema[name].get("properties")
        if isinstance(value, dict) and inner is not None:
            assert value.keys() == inner.keys(), name
            for key in value:
                assert f".Values.{name}.{key}" in templates, f"{name}.{key}"


def test_the_readme_tells_of_each_way_to_run_it():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in ("Dockerfile", "compose.yaml", "helm/headrace", "systemd/headrace.service"):
        assert (DEPLOY / path).exists()
        assert f"deploy/{path}" in readme
