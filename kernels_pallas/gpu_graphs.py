"""What must be said before JAX meets an NVIDIA GPU. Needs no JAX.

A step is to be one CUDA graph, and most of the memory is for weights and KV cache.
"""

from collections.abc import MutableMapping
from pathlib import Path

__all__ = ["LOOPS_IN_GRAPHS", "prepare_for_gpu"]

# XLA leaves loops out of its graphs, and with one everything around it; a step has a few short
# ones. The layers are unrolled.
LOOPS_IN_GRAPHS = "--xla_gpu_enable_command_buffer=+WHILE"

OPTION = LOOPS_IN_GRAPHS.partition("=")[0]

# JAX takes this share of the memory at its start; by itself three quarters. What is left is for the
# driver, graphs, libraries, and the process that tests kernels.
MEMORY_VARIABLE, MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION", "0.90"


def prepare_for_gpu(
    environment: MutableMapping[str, str], *, nvidia_driver: Path = Path("/proc/driver/nvidia")
) -> None:
    """Say so where there is an NVIDIA GPU, unless somebody has decided it already.

    Args:
        environment: of this process, before JAX's first use of a device.
        nvidia_driver: what exists where the driver is loaded.
    """
    flags = environment.get("XLA_FLAGS", "")
    if not nvidia_driver.exists():
        return
    environment.setdefault(MEMORY_VARIABLE, MEMORY_SHARE)
    if OPTION not in flags:
        environment["XLA_FLAGS"] = f"{flags} {LOOPS_IN_GRAPHS}".strip()
