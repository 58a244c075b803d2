"""The attention kernels that work on this machine, ready to run."""

import functools

import jax

from jaxengine.weights.source import cache_dir
from kernels_pallas import native
from kernels_pallas.choice import KernelChoice, KernelUnavailable, choose_kernel, kernels_dir
from kernels_pallas.kernel_names import AttentionKernel, WantedKernel
from kernels_pallas.native import NativeLibrary


@functools.cache
def ready_kernel(wanted: WantedKernel = "auto") -> AttentionKernel:
    """Choose as a server would, and make the kernel known to XLA.

    Raises:
        KernelUnavailable: it does not work here.
    """
    choice = choose_kernel(
        wanted,
        platform=jax.default_backend(),
        block_size=16,
        folder=kernels_dir(cache_dir()),
    )
    if choice.library is not None:
        native.load(choice.library)
    return choice.kernel


def ready_library(kernel: AttentionKernel) -> NativeLibrary | None:
    """Return the native library where that kernel serves."""
    choice = _native_choice() if kernel == "native" else None
    return None if choice is None or choice.library is None else native.load(choice.library)


def can_project() -> bool:
    """Whether packed weights can be multiplied with here."""
    choice = _native_choice()
    return choice is not None and choice.can_project


def reads_codes() -> bool:
    """Whether products of few tokens read codes here."""
    choice = _native_choice()
    return choice is not None and choice.reads_codes


@functools.cache
def _native_choice() -> KernelChoice | None:
    """Return the native kernel, known to XLA, if it works here."""
    try:
        choice = choose_kernel(
            "native",
            platform=jax.default_backend(),
            block_size=16,
            folder=kernels_dir(cache_dir()),
        )
    except KernelUnavailable:
        return None
    ready_kernel("native")
    return choice
