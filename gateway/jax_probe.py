"""Which devices JAX sees, asked in a process of its own.

A broken GPU driver can hang or crash whoever loads it; the one that asks must survive that.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Device", "JaxProbe", "probe_jax"]

PROBE = """
import json
import jax
devices = [
    {"platform": d.platform, "kind": d.device_kind,
     "memory_bytes": (d.memory_stats() or {}).get("bytes_limit")}
    for d in jax.devices()
]
print(json.dumps({"backend": jax.default_backend(), "devices": devices}))
"""
KILL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Device:
    """A device that computations can run on; memory is None where JAX does not tell."""

    platform: str
    kind: str
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class JaxProbe:
    """What JAX answered.

    Attributes:
        backend: "cpu", "gpu" or "tpu"; None when it gave no answer.
        devices: the devices of that backend.
        error: why there is no answer, in one line.
    """

    backend: str | None = None
    devices: tuple[Device, ...] = ()
    error: str | None = None


def probe_jax(
    timeout_s: float = 60.0, command: Sequence[str] = (sys.executable, "-c", PROBE)
) -> JaxProbe:
    """Ask JAX for its devices.

    Args:
        timeout_s: after which JAX counts as hanging.
        command: prints the answer as the last line of its output.
    """
    if importlib.util.find_spec("jax") is None:
        return JaxProbe(error="jax is not installed")
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Looking must not take most of a GPU's memory, which is what JAX does by default.
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        give_up(process)
        return JaxProbe(error=f"JAX gave no answer within {timeout_s:g} s; does a driver hang?")
    if process.returncode != 0:
        return JaxProbe(error=f"exit code {process.returncode}: {last_line(errors)}")
    try:
        answer = json.loads(last_line(output))
        devices = tuple(Device(**device) for device in answer["devices"])
        return JaxProbe(backend=answer["backend"], devices=devices)
    except (ValueError, KeyError, TypeError):
        return JaxProbe(error=f"JAX answered with something else: {last_line(output)!r}")


def give_up(process: subprocess.Popen[str]) -> None:
    """Kill a process, and do not wait for ever if the kernel cannot end it."""
    process.kill()
    try:
        process.communicate(timeout=KILL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def last_line(text: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
