"""The Helm chart as Helm renders it: what its objects say of each other, and of the server.

tests/golden/make_chart.py renders it, with Helm; here that is only read.
"""

import importlib.util
import itertools
from pathlib import Path

import click
import pytest
import yaml

from gateway.app import build_app
from gateway.commands.serve_options import serve_options
from gateway.config import GatewayConfig
from gateway.key_ring import KeyRing

RENDERED = Path(__file__).parent / "golden" / "chart"
FILES = sorted(RENDERED.glob("*.yaml"))

each_case = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def objects(path) -> dict[str, dict]:
    """The objects by kind; there is one of each."""
    documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    kinds = {document["kind"]: document for document in documents}
    assert len(kinds) == len(documents)
    return kinds


def pod_of(kinds) -> dict:
    return kinds["Deployment"]["spec"]["template"]["spec"]


def container_of(kinds) -> dict:
    [container] = pod_of(kinds)["containers"]
    return container


def maker():
    spec = importlib.util.spec_from_file_location("make_chart", RENDERED.parent / "make_chart.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_read_here_is_of_the_chart_as_it_is():
    made_by = maker()
    assert {path.stem for path in FILES} == set(made_by.cases())
    for path in FILES:
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        assert first == f"# of chart {made_by.digest()}", "run tests/golden/make_chart.py"


@each_case
def test_the_server_understands_its_arguments(path, tmp_path):
    @click.command()
    @click.argument("model", required=False)
    @serve_options
    def serve(**_options):
        pass

    command, *arguments = container_of(objects(path))["args"]
    assert command == "serve"
    (tmp_path / "keys.json").touch()  # it has to be there, and is, in the pod
    arguments = [argument.replace("/etc/headrace", str(tmp_path)) for argument in arguments]
    options = serve.make_context("serve", arguments).params
    assert (options["host"], options["port"]) == ("0.0.0.0", 8000)
    kinds = objects(path)
    grace_s = pod_of(kinds)["terminationGracePeriodSeconds"]
    [_, pause_s] = container_of(kinds)["lifecycle"]["preStop"]["exec"]["command"]
    assert grace_s > int(pause_s) + options["shutdown_timeout"]
    has_keys = any(volume["name"] == "keys" for volume in pod_of(kinds)["volumes"])
    assert has_keys == (options["api_keys_file"] is not None)
    assert has_keys or options["allow_unauthenticated"]


@each_case
def test_selectors_find_the_pod_and_ports_have_their_names(path):
    kinds = objects(path)
    deployment = kinds["Deployment"]["spec"]
    labels = deployment["template"]["metadata"]["labels"].items()
    selectors = [deployment["selector"]["matchLabels"], kinds["Service"]["spec"]["selector"]]
    selectors.append(kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"])
    assert all(selector.items() <= labels for selector in selectors)
    [port] = container_of(kinds)["ports"]
    [service_port] = kinds["Service"]["spec"]["ports"]
    assert service_port["targetPort"] == port["name"]
    if monitor := kinds.get("ServiceMonitor"):
        service_labels = kinds["Service"]["metadata"]["labels"].items()
        assert monitor["spec"]["selector"]["matchLabels"].items() <= service_labels
        assert [e["port"] for e in monitor["spec"]["endpoints"]] == [service_port["name"]]
    if ingress := kinds.get("Ingress"):
        for rule in ingress["spec"]["rules"]:
            for route in rule["http"]["paths"]:
                backend = route["backend"]["service"]
                assert backend["name"] == kinds["Service"]["metadata"]["name"]
                assert backend["port"]["name"] == service_port["name"]
    if scaler := kinds.get("HorizontalPodAutoscaler"):
        assert scaler["spec"]["scaleTargetRef"]["name"] == kinds["Deployment"]["metadata"]["name"]
        assert "replicas" not in deployment


@each_case
def test_probes_ask_addresses_that_need_no_key_and_have_time_to_start(path, make_generator):
    generator = make_generator()
    app = build_app(GatewayConfig(), generator, generator.metrics, KeyRing(None))
    served = {route.resource.canonical for route in app.router.routes()}
    container = container_of(objects(path))
    probes = [container[name] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert [probe["httpGet"]["path"] for probe in probes] == ["/health", "/health", "/ready"]
    assert {probe["httpGet"]["path"] for probe in probes} <= served
    [port] = container["ports"]
    assert {probe["httpGet"]["port"] for probe in probes} == {port["name"]}
    assert probes[0]["failureThreshold"] * probes[0]["periodSeconds"] >= 600


@each_case
def test_what_is_mounted_is_there_and_the_rest_cannot_be_written(path):
    kinds = objects(path)
    pod, container = pod_of(kinds), container_of(kinds)
    volumes = [volume["name"] for volume in pod["volumes"]]
    mounts = [mount["name"] for mount in container["volumeMounts"]]
    assert len(set(volumes)) == len(volumes)
    assert sorted(set(mounts)) == sorted(volumes)
    places = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert {"/var/cache/headrace", "/tmp"} <= set(places)
    assert len(set(places)) == len(places)
    claims = [volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["volumes"]]
    if claim := kinds.get("PersistentVolumeClaim"):
        assert claim["metadata"]["name"] in claims
    rights = {**pod["securityContext"], **container["securityContext"]}
    assert rights["runAsNonRoot"]
    assert rights["readOnlyRootFilesystem"]
    assert not rights["allowPrivilegeEscalation"]
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert not pod["automountServiceAccountToken"]


@each_case
def test_every_object_says_whose_it_is(path):
    kinds = objects(path)
    for kind, document in kinds.items():
        labels = document["metadata"]["labels"]
        assert labels["app.kubernetes.io/managed-by"] == "Helm", kind
        assert labels["app.kubernetes.io/name"] == "headrace", kind
    assert kinds["ServiceAccount"]["metadata"]["name"] == pod_of(kinds)["serviceAccountName"]


def test_a_volume_of_one_pod_is_not_shared_while_it_rolls():
    by_name = {path.stem: objects(path) for path in FILES}
    strategies = {
        name: kinds["Deployment"]["spec"]["strategy"]["type"] for name, kinds in by_name.items()
    }
    assert strategies == {
        "default": "RollingUpdate",
        "everything": "RollingUpdate",
        "gpu": "Recreate",
    }
    gpu = container_of(by_name["gpu"])["resources"]["limits"]
    assert gpu["nvidia.com/gpu"] == "1"


def test_the_cases_have_every_kind_of_object():
    kinds = set(itertools.chain.from_iterable(objects(path) for path in FILES))
    templates = RENDERED.parents[2] / "deploy" / "helm" / "headrace" / "templates"
    in_chart = {
        line.removeprefix("kind: ").strip()
        for path in templates.glob("*.yaml")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("kind: ")
    }
    assert kinds == in_chart
