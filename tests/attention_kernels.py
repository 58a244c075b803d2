"""The attention kernels that work on this machine, ready to run."""

import functools

import jax

from jaxengine.weights.source import cache_dir
from kernels_pallas import native
from kernels_pallas.choice import KernelUnavailable, choose_kernel, kernels_dir
from kernels_pallas.kernel_names import AttentionKernel, WantedKernel


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


@functools.cache
def can_project() -> bool:
    """Whether packed weights can be multiplied with here."""
    try:
        choice = choose_kernel(
            "native",
            platform=jax.default_backend(),
            block_size=16,
            folder=kernels_dir(cache_dir()),
        )
    except KernelUnavailable:
        return False
    ready_kernel("native")
    return choice.can_project
