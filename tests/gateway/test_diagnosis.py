import dataclasses
import socket
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from gateway import diagnosis
from gateway.diagnosis import (
    GIB,
    SUPPORTED_PYTHON,
    SUPPORTED_VERSIONS,
    Check,
    can_serve,
    check_attention,
    check_cpu,
    check_devices,
    check_disk,
    check_folder,
    check_memory,
    check_package,
    check_port,
    check_python,
    compile_cache_dir,
    model_cache_dir,
)
from gateway.jax_probe import Device, JaxProbe
from gateway.machine import Machine
from jaxengine.config import EngineConfig
from kernels_pallas.choice import KernelChoice
from kernels_pallas.gpu_choice import GpuUse

CPU = JaxProbe("cpu", (Device("cpu", "cpu", None),))
GPU = JaxProbe("gpu", (Device("gpu", "H200", 139 * GIB),))
BROKEN = JaxProbe(error="driver hangs")


def make_machine(**fields: object) -> Machine:
    machine = Machine(
        python="CPython 3.12.1",
        os="Linux",
        cpu="EPYC",
        num_cpus=2,
        cpu_quota=None,
        cpu_flags=("avx2", "avx512_bf16"),
        memory_bytes=24 * GIB,
        memory_available_bytes=20 * GIB,
    )
    return dataclasses.replace(machine, **fields)


def test_a_machine_serves_unless_something_fails():
    assert can_serve([Check("a", "ok", ""), Check("b", "warn", "")])
    assert not can_serve([Check("a", "ok", ""), Check("b", "fail", "")])


@pytest.mark.parametrize(
    ("running", "status"),
    [((3, 11), "fail"), ((3, 12), "ok"), ((3, 13), "ok"), ((3, 14), "fail")],
)
def test_python_must_be_one_that_is_supported(running: tuple[int, int], status: str):
    assert check_python(make_machine(), running).status == status


def test_bf16_instructions_decide_which_dtype_is_advised():
    assert check_cpu(make_machine()).status == "ok"
    check = check_cpu(make_machine(cpu_flags=("avx2",)))
    assert check.status == "warn"
    assert "--dtype float32" in check.why


@pytest.mark.parametrize(
    ("flags", "is_said"),
    [
        (("amx_bf16", "amx_int8"), True),
        (("avx512_bf16", "avx512_vnni"), True),
        (("avx2", "avx_vnni"), True),
        (("avx512_bf16",), False),
        (("avx2",), False),
    ],
)
def test_instructions_for_eight_bits_are_worth_a_hint(flags, is_said):
    assert ("--quantization int8" in check_cpu(make_machine(cpu_flags=flags)).why) == is_said


def test_a_limited_or_unknown_cpu_is_said_to_be_one():
    check = check_cpu(make_machine(cpu=None, cpu_quota=1.5, cpu_flags=()))
    assert check.value == "unknown CPU, 2 CPUs, limited to 1.5; no flags"


@pytest.mark.parametrize(
    ("total", "available", "status", "value"),
    [
        (24 * GIB, 20 * GIB, "ok", "24.0 GiB, 20.0 GiB free"),
        (4 * GIB, 3 * GIB, "ok", "4.0 GiB, 3.0 GiB free"),
        (4 * GIB, 1 * GIB, "warn", "4.0 GiB, 1.0 GiB free"),
        (1 * GIB, 20 * GIB, "warn", "1.0 GiB, 1.0 GiB free"),  # a container in a large machine
        (8 * GIB, None, "ok", "8.0 GiB, 8.0 GiB free"),
        (None, None, "warn", "unknown"),
    ],
)
def test_free_memory_is_what_counts(
    total: int | None, available: int | None, status: str, value: str
):
    check = check_memory(make_machine(memory_bytes=total, memory_available_bytes=available))
    assert (check.status, check.value) == (status, value)


@pytest.mark.parametrize(
    ("installed", "status"),
    [
        ("0.11.1", "warn"),
        ("0.11.2", "ok"),
        ("0.12.0.1", "ok"),
        ("0.12.3.dev20261101", "ok"),
        ("0.13.0", "warn"),
        ("1.0", "warn"),
    ],
)
def test_a_version_is_ok_within_the_tested_range(
    installed: str, status: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(diagnosis, "version", lambda name: installed)
    check = check_package("jax")
    assert check.status == status
    assert check.value == f"{installed}, jaxlib {installed}"


def test_a_package_that_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(diagnosis, "version", version)
    check = check_package("flax")
    assert (check.status, check.value) == ("fail", "flax is not installed")
    assert "headrace[serve]" in check.why


def test_the_supported_versions_are_those_of_pyproject():
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text())["project"]
    requirements = project["optional-dependencies"]["serve"]
    for name, (lowest, beyond) in SUPPORTED_VERSIONS.items():
        assert f"{name}>={lowest},<{beyond}" in requirements
    lowest_python, beyond_python = SUPPORTED_PYTHON
    expected = ">={}.{},<{}.{}".format(*lowest_python, *beyond_python)
    assert project["requires-python"] == expected


def test_devices_are_listed_with_their_memory(tmp_path: Path):
    assert check_devices(GPU, tmp_path).value == "gpu: H200 (139.0 GiB)"
    assert check_devices(CPU, tmp_path / "none").status == "ok"


def test_several_devices_are_told_how_to_share_a_model(tmp_path: Path):
    check = check_devices(JaxProbe("gpu", GPU.devices * 4), tmp_path)
    assert check.status == "ok"
    assert "--tensor-parallel-size 4" in check.why


def test_a_gpu_that_jax_does_not_see_is_pointed_out(tmp_path: Path):
    check = check_devices(CPU, nvidia_driver=tmp_path)
    assert check.status == "warn"
    assert "headrace[cuda]" in check.why


def test_no_answer_from_jax_fails_devices_and_attention():
    assert check_devices(BROKEN) == Check("devices", "fail", "none", "driver hangs")
    assert check_attention(BROKEN, Path("cache")).status == "fail"


@pytest.mark.parametrize(
    ("seen", "status", "value"),
    [
        (KernelChoice("native", "the first start compiles it"), "ok", "native"),
        (KernelChoice("reference", "no compiler"), "warn", "reference, in XLA: correct but slower"),
    ],
)
def test_the_attention_that_would_serve_is_told_with_its_reason(
    seen: KernelChoice, status: str, value: str, monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def foresee(**facts: object) -> KernelChoice:
        asked.append(facts)
        return seen

    monkeypatch.setattr(diagnosis, "foresee_kernel", foresee)
    assert check_attention(GPU, Path("cache")) == Check("attention", status, value, seen.reason)
    folder = Path("cache/kernels")
    block_size = EngineConfig().block_size
    gpu = GpuUse(device=GPU.devices[0].kind)
    assert asked == [{"platform": "gpu", "block_size": block_size, "folder": folder, "gpu": gpu}]


def test_folders_tell_what_is_in_them(tmp_path: Path):
    assert check_folder("models", tmp_path / "none", "comes later").why == "comes later"
    for name in "abcdef":
        (tmp_path / name).mkdir()
    (tmp_path / "a/weights").write_bytes(b"x" * 3 * 2**20)
    check = check_folder("models", tmp_path, "comes later")
    assert check.value == f"{tmp_path}: 3.0 MiB in a, b, c, d and 2 more"
    assert check.why == ""


def test_disk_space_is_looked_up_where_the_folder_will_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[Path] = []

    class Usage:
        free = 2**20

    def disk_usage(path: Path) -> type[Usage]:
        asked.append(path)
        return Usage

    monkeypatch.setattr(diagnosis.shutil, "disk_usage", disk_usage)
    check = check_disk(tmp_path / "not/yet/there")
    assert asked == [tmp_path]
    assert (check.status, check.value) == ("warn", "1.0 MiB free")
    Usage.free = 50 * GIB
    assert check_disk(tmp_path).status == "ok"


def test_a_port_in_use_is_pointed_out():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check = check_port(port)
        assert check.status == "warn"
        assert "--port" in check.why
    assert check_port(port).status == "ok"


def test_the_folders_are_those_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    assert model_cache_dir() == tmp_path
    assert compile_cache_dir(tmp_path) == tmp_path / "compiled"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    assert compile_cache_dir(tmp_path) == Path("/elsewhere")


def test_an_installation_without_the_server_has_no_model_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(diagnosis.importlib.util, "find_spec", lambda name: None)
    assert model_cache_dir() is None


@pytest.mark.parametrize(
    ("count", "text"), [(512, "0.5 KiB"), (3 * 2**20, "3.0 MiB"), (5 * GIB // 2, "2.5 GiB")]
)
def test_sizes_are_for_people(count: int, text: str):
    assert diagnosis.format_bytes(count) == text
