"""A step as one CUDA graph: what XLA must be told before JAX meets the device. Needs no JAX."""

from collections.abc import MutableMapping
from pathlib import Path

__all__ = ["LOOPS_IN_GRAPHS", "put_loops_into_graphs"]

# XLA leaves loops out of its graphs, and with one everything around it; a step has a few short
# ones. The layers are unrolled.
LOOPS_IN_GRAPHS = "--xla_gpu_enable_command_buffer=+WHILE"

OPTION = LOOPS_IN_GRAPHS.partition("=")[0]


def put_loops_into_graphs(
    environment: MutableMapping[str, str], *, nvidia_driver: Path = Path("/proc/driver/nvidia")
) -> None:
    """Say so in XLA_FLAGS where there is an NVIDIA GPU, unless somebody has decided it already.

    Args:
        environment: of this process, before JAX's first use of a device.
        nvidia_driver: what exists where the driver is loaded.
    """
    flags = environment.get("XLA_FLAGS", "")
    if nvidia_driver.exists() and OPTION not in flags:
        environment["XLA_FLAGS"] = f"{flags} {LOOPS_IN_GRAPHS}".strip()
