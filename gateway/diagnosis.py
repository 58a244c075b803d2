"""Can this machine serve, and how well? One check for each thing that decides it.

The checks need none of the server's packages: saying what is missing is what they are for.
"""

import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from gateway.jax_probe import JaxProbe
from gateway.machine import Machine
from kernels_pallas.choice import default_block_size, foresee_kernel, kernels_dir
from kernels_pallas.gpu_choice import GpuUse

__all__ = [
    "SUPPORTED_VERSIONS",
    "Check",
    "Status",
    "can_serve",
    "check_attention",
    "check_cpu",
    "check_devices",
    "check_disk",
    "check_folder",
    "check_memory",
    "check_package",
    "check_port",
    "check_python",
    "compile_cache_dir",
    "format_bytes",
    "model_cache_dir",
]

Status = Literal["ok", "warn", "fail"]

GIB = 2**30
# A server of the default model with default settings takes 2.7 GiB, 1 GiB of it for the KV cache.
LEAST_MEMORY_BYTES = 3 * GIB
COMFORTABLE_MEMORY_BYTES = 6 * GIB
COMFORTABLE_DISK_BYTES = 1 * GIB

# From, and below which. A test compares them with pyproject.toml.
SUPPORTED_VERSIONS = {"jax": ("0.11.2", "0.13"), "flax": ("0.12", "0.13")}
SUPPORTED_PYTHON = ((3, 12), (3, 14))


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the diagnosis.

    Attributes:
        status: "fail" means that no server can run here; "warn", that something will be missed.
        value: what was found.
        why: what follows from it; empty if nothing does.
    """

    name: str
    status: Status
    value: str
    why: str = ""


def can_serve(checks: Sequence[Check]) -> bool:
    """Whether nothing stands in the way of a server."""
    return all(check.status != "fail" for check in checks)


def check_python(machine: Machine, running: tuple[int, int] = sys.version_info[:2]) -> Check:
    """The interpreter."""
    value = f"{machine.python} on {machine.os}"
    lowest, beyond = SUPPORTED_PYTHON
    if lowest <= running < beyond:
        return Check("python", "ok", value)
    return Check("python", "fail", value, "Python 3.12 or 3.13 is needed")


def check_cpu(machine: Machine) -> Check:
    """Cores, and the instructions that products of bf16 and int8 matrices run on."""
    cores = f"{machine.num_cpus} CPUs"
    if machine.cpu_quota is not None:
        cores += f", limited to {machine.cpu_quota:g}"
    value = f"{machine.cpu or 'unknown CPU'}, {cores}; {' '.join(machine.cpu_flags) or 'no flags'}"
    hint = ""
    if {"amx_int8", "avx512_vnni", "avx_vnni"} & set(machine.cpu_flags):
        hint = "; --quantization int8 is faster, for a little quality"
    if {"amx_bf16", "avx512_bf16", "bf16"} & set(machine.cpu_flags):
        why = "has bf16 instructions: --dtype bfloat16 is the fast one"
        return Check("cpu", "ok", value, why + hint)
    why = "has no bf16 instructions: try --dtype float32, it may be faster"
    return Check("cpu", "warn", value, why + hint)


def check_memory(machine: Machine) -> Check:
    """Memory that is there, and free."""
    if machine.memory_bytes is None:
        return Check("memory", "warn", "unknown", "the system does not tell")
    available = machine.memory_available_bytes
    free = machine.memory_bytes if available is None else min(available, machine.memory_bytes)
    value = f"{format_bytes(machine.memory_bytes)}, {format_bytes(free)} free"
    if free < LEAST_MEMORY_BYTES:
        why = "a server of the default model takes about 2.7 GiB; try --kv-cache-memory-bytes 256M"
        return Check("memory", "warn", value, why)
    if free < COMFORTABLE_MEMORY_BYTES:
        return Check("memory", "ok", value, "enough for the default model, little for larger ones")
    return Check("memory", "ok", value)


def check_package(name: str) -> Check:
    """A package of the server and whether its version is one that we know to work."""
    lowest, beyond = SUPPORTED_VERSIONS[name]
    try:
        installed = version(name)
        value = f"{installed}, jaxlib {version('jaxlib')}" if name == "jax" else installed
    except PackageNotFoundError as error:
        value = f"{error.name} is not installed"
        return Check(name, "fail", value, "pip install 'headrace[serve]' brings it")
    if parse_version(lowest) <= parse_version(installed) < parse_version(beyond):
        return Check(name, "ok", value)
    return Check(name, "warn", value, f"not tested; tested are {lowest} up to below {beyond}")


def parse_version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version."""
    numbers: list[int] = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def check_devices(probe: JaxProbe, nvidia_driver: Path = Path("/proc/driver/nvidia")) -> Check:
    """What JAX can compute on."""
    if probe.error is not None:
        return Check("devices", "fail", "none", probe.error)
    names = [
        f"{device.platform}: {device.kind}"
        + (f" ({format_bytes(device.memory_bytes)})" if device.memory_bytes else "")
        for device in probe.devices
    ]
    value = ", ".join(names)
    if probe.backend == "cpu" and nvidia_driver.exists():
        why = "an NVIDIA driver is loaded but JAX does not see a GPU: pip install 'headrace[cuda]'"
        return Check("devices", "warn", value, why)
    if (number := len(probe.devices)) > 1:
        why = f"one serves; --tensor-parallel-size {number} has all of them share a model"
        return Check("devices", "ok", value, why)
    return Check("devices", "ok", value)


def check_attention(probe: JaxProbe, cache: Path) -> Check:
    """Which attention a server here would run, and why; compiles nothing.

    Args:
        probe: what JAX answered.
        cache: our cache, where compiled kernels lie.
    """
    if probe.backend is None:
        return Check("attention", "fail", "none", "without a device nothing can run")
    seen = foresee_kernel(
        platform=probe.backend,
        block_size=default_block_size(probe.backend),
        folder=kernels_dir(cache),
        # Of the model nothing is known here: bfloat16, and heads of at most 128, as most have.
        gpu=GpuUse(device=probe.devices[0].kind) if probe.backend == "gpu" else None,
    )
    if seen.kernel == "reference":
        return Check("attention", "warn", "reference, in XLA: correct but slower", seen.reason)
    return Check("attention", "ok", seen.kernel, seen.reason)


def model_cache_dir() -> Path | None:
    """Where downloaded models lie; None in an installation without the server."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    # Here and not above: without the extra `serve` this import fails, and the rest must still work.
    from jaxengine.weights.source import cache_dir

    return cache_dir()


def compile_cache_dir(model_cache: Path) -> Path:
    """Where compiled programs lie."""
    own = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    return Path(own) if own else model_cache / "compiled"


def check_folder(name: str, folder: Path, empty: str) -> Check:
    """A folder of ours and what is in it.

    Args:
        name: of the check.
        folder: need not exist.
        empty: what follows when it holds nothing.
    """
    entries = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    if not entries:
        return Check(name, "ok", f"{folder}: empty", empty)
    listed = ", ".join(entries[:4]) + (f" and {len(entries) - 4} more" if len(entries) > 4 else "")
    return Check(name, "ok", f"{folder}: {format_bytes(folder_bytes(folder))} in {listed}")


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; files that vanish meanwhile count as nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def check_disk(folder: Path) -> Check:
    """Free space where models are downloaded to."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < COMFORTABLE_DISK_BYTES:
        return Check("disk", "warn", f"{format_bytes(free)} free", "a download may not fit")
    return Check("disk", "ok", f"{format_bytes(free)} free")


def check_port(port: int, host: str = "127.0.0.1") -> Check:
    """Whether the address that `headrace serve` takes by default is free."""
    value = f"{host}:{port}"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            why = f"{error.strerror}; choose another with --port"
            return Check("port", "warn", f"{value} is taken", why)
    return Check("port", "ok", f"{value} is free")


def format_bytes(count: int) -> str:
    """A size for people."""
    if count >= GIB:
        return f"{count / GIB:.1f} GiB"
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
