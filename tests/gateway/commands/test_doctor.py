from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner

from gateway.commands import doctor as doctor_module
from gateway.commands.doctor import diagnose, doctor, make_verdict
from gateway.diagnosis import Check
from gateway.jax_probe import Device, JaxProbe
from gateway.machine import read_machine

CPU = JaxProbe("cpu", (Device("cpu", "cpu", None),))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor_module, "probe_jax", lambda timeout_s: CPU)
    return tmp_path


def test_everything_that_decides_is_looked_at():
    names = [check.name for check in diagnose(read_machine(), CPU)]
    assert names == [
        *("python", "cpu", "memory", "jax", "flax", "devices", "attention"),
        *("models", "compiled", "disk", "port"),
    ]


def test_an_installation_without_the_server_is_diagnosed_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor_module, "model_cache_dir", lambda: None)
    names = [check.name for check in diagnose(read_machine(), CPU)]
    assert "models" not in names
    assert "port" in names


@pytest.mark.parametrize(
    ("statuses", "verdict"),
    [
        (["ok", "ok"], "This machine can run headrace serve."),
        (["ok", "warn"], "This machine can run headrace serve, with 1 warning."),
        (["warn", "warn"], "This machine can run headrace serve, with 2 warnings."),
        (["fail", "ok"], "This machine cannot serve yet: check0. The client works without."),
    ],
)
def test_the_verdict_is_one_sentence(statuses: list, verdict: str):
    checks = [Check(f"check{i}", status, "") for i, status in enumerate(statuses)]
    assert make_verdict(checks) == verdict


def test_the_diagnosis_is_printed_for_people(cache: Path):
    result = CliRunner().invoke(doctor, [])
    assert result.exit_code == 0, result.output
    assert "attention" in result.output
    assert "This machine can run headrace serve" in result.output


def test_the_diagnosis_is_json_for_programs(cache: Path):
    result = CliRunner().invoke(doctor, ["--json"])
    assert result.exit_code == 0, result.output
    document = orjson.loads(result.output)
    assert document["can_serve"] is True
    assert document["jax"]["backend"] == "cpu"
    assert {"name", "status", "value", "why"} == document["checks"][0].keys()
    assert document["machine"]["num_cpus"] >= 1


def test_a_machine_that_cannot_serve_is_exit_code_1_and_keeps_its_brackets(
    monkeypatch: pytest.MonkeyPatch,
):
    failed = Check("jax", "fail", "jax is not installed", "pip install 'headrace[serve]' brings it")
    monkeypatch.setattr(doctor_module, "diagnose", lambda machine, probe: [failed])
    result = CliRunner().invoke(doctor, [])
    assert result.exit_code == 1
    assert "headrace[serve]" in result.output
    assert "cannot serve yet: jax" in result.output
