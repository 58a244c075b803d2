"""What machine this is: the facts that decide how fast, and whether, a model runs here."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CPU_FLAGS", "Machine", "read_machine"]

# Instruction sets that change what the CPU path can do, as the kernel names them, best last.
CPU_FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimddp",
    "bf16",
    "i8mm",
    "sve",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine as this process sees it. None where the system does not tell.

    Attributes:
        num_cpus: logical CPUs that this process may run on.
        cpu_quota: CPUs that a container's limit amounts to.
        cpu_flags: those of CPU_FLAGS that the CPU has.
        memory_bytes: of the machine, or a container's limit if that is less.
    """

    python: str
    os: str
    cpu: str | None
    num_cpus: int
    cpu_quota: float | None
    cpu_flags: tuple[str, ...]
    memory_bytes: int | None
    memory_available_bytes: int | None


def read_machine(root: Path = Path("/")) -> Machine:
    """Look at the machine.

    Args:
        root: where proc/ and sys/ lie.
    """
    cpu_model, flags = read_cpu(root / "proc/cpuinfo")
    memory = read_memory(root / "proc/meminfo")
    limit = read_integer(root / "sys/fs/cgroup/memory.max")
    total = memory.get("MemTotal")
    return Machine(
        python=f"{platform.python_implementation()} {platform.python_version()}",
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu_model,
        num_cpus=count_cpus(),
        cpu_quota=read_cpu_quota(root / "sys/fs/cgroup/cpu.max"),
        cpu_flags=tuple(flag for flag in CPU_FLAGS if flag in flags),
        memory_bytes=min((n for n in (total, limit) if n is not None), default=None),
        memory_available_bytes=memory.get("MemAvailable"),
    )


def count_cpus() -> int:
    """Logical CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_text(path: Path) -> str:
    """The text of a file of the kernel, or nothing where it is missing or closed to us."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_cpu(cpuinfo: Path) -> tuple[str | None, frozenset[str]]:
    """Model and flags of the first CPU."""
    fields: dict[str, str] = {}
    for line in read_text(cpuinfo).splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags") or fields.get("Features") or ""  # x86, Arm
    return fields.get("model name") or None, frozenset(flags.split())


def read_memory(meminfo: Path) -> dict[str, int]:
    """The fields of /proc/meminfo, in bytes."""
    fields: dict[str, int] = {}
    for line in read_text(meminfo).splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[0].isdecimal() and words[1] == "kB":
            fields[name] = int(words[0]) * 1024
    return fields


def read_integer(path: Path) -> int | None:
    """A file that holds one number; "max", or no file, is None."""
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None


def read_cpu_quota(path: Path) -> float | None:
    """CPUs from "QUOTA PERIOD"."""
    words = read_text(path).split()
    if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]) > 0:
        return int(words[0]) / int(words[1])
    return None
