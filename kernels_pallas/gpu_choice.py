"""Whether a GPU kernel works on a GPU, found out before it serves. Needs no JAX.

The test runs in a process of its own, because a kernel whose barriers do not match hangs, and a
process that hangs can be killed.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from kernels_pallas.kernel_names import AttentionKernel
from kernels_pallas.native_build import BuildError, run_limited

__all__ = ["GPU_KERNELS", "HEAD_DIMS", "GpuUse", "find_gpu_fault"]

# The fastest first, as estimated.
GPU_KERNELS: tuple[AttentionKernel, ...] = ("mosaic_gpu", "triton")

# GPUs with the instructions that the kernel is made of.
MOSAIC_DEVICES = re.compile(r"\b(H20|H100|H200|H800|GH200)\b")
MOSAIC_DTYPES = ("bfloat16", "float16")
# The widest heads.
HEAD_DIMS: Mapping[AttentionKernel, int] = {"mosaic_gpu": 128, "triton": 256}
BLOCK_SIZES = (8, 16, 32, 64, 128)

# Imports, the driver, and a few programs to compile.
SELF_TEST_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuUse:
    """What a kernel is wanted for.

    Attributes:
        device: the GPU, as JAX names it.
        kv_cache_dtype: of the cache.
        head_dim: of the model.
        is_plain: whether no layer has a sliding window or a soft cap.
    """

    device: str
    kv_cache_dtype: str = "bfloat16"
    head_dim: int = 128
    is_plain: bool = True


def find_gpu_fault(
    kernel: AttentionKernel, use: GpuUse, *, block_size: int, may_run: bool
) -> str | None:
    """Return why a kernel cannot be used; None if it can.

    Args:
        kernel: one of GPU_KERNELS.
        use: what for.
        block_size: tokens of a KV block.
        may_run: whether to test it on the GPU.
    """
    if not use.device.startswith("NVIDIA"):
        return f"it is for NVIDIA GPUs, not for {use.device}"
    if kernel == "mosaic_gpu" and not MOSAIC_DEVICES.search(use.device):
        return f"it is for Hopper, not for {use.device}"
    if kernel == "mosaic_gpu" and use.kv_cache_dtype not in MOSAIC_DTYPES:
        return f"it has no KV cache of {use.kv_cache_dtype}"
    if use.head_dim > HEAD_DIMS[kernel]:
        return f"it has heads of up to {HEAD_DIMS[kernel]}, not of {use.head_dim}"
    if block_size not in BLOCK_SIZES:
        return f"it has block sizes of {', '.join(map(str, BLOCK_SIZES))}, not {block_size}"
    return _test(kernel, use, block_size) if may_run else None


def _test(kernel: AttentionKernel, use: GpuUse, block_size: int) -> str | None:
    command = [
        *(sys.executable, "-m", "kernels_pallas.gpu_self_test"),
        *(kernel, use.kv_cache_dtype, str(block_size), str(use.head_dim)),
        *([] if use.is_plain else ["windows"]),
    ]
    try:
        run_limited(command, timeout_s=SELF_TEST_TIMEOUT_S)
    except BuildError as error:
        return str(error)
    return None
