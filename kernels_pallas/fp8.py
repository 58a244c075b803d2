"""Products with weights of eight-bit floats (e4m3), for GPUs that multiply them.

Every output has one scale, its largest weight / 448, the largest number that there is; so has
every row of activations, found when the row is there. Both are multiplied after the product, so
that its operands are eight-bit floats and nothing else, which XLA gives to the GPU as they are.

Letters: T tokens, I inputs, O outputs.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float
from numpy.typing import NDArray

__all__ = ["DTYPE", "find_fault", "project", "quantize"]

DTYPE = jnp.dtype(jnp.float8_e4m3fn)
LARGEST = 448
# A row of nothing but numbers below this is scaled as if this were its largest.
LEAST_MAGNITUDE = 1e-30

# The first GPUs with products of such numbers: Ada, then Hopper.
LEAST_CAPABILITY = (8, 9)


def find_fault(device: jax.Device) -> str | None:
    """Return why such weights are not for a device; None if they are."""
    capability = str(getattr(device, "compute_capability", ""))
    # AMD's GPUs have one too, as gfx942, and other eight-bit floats.
    if re.fullmatch(r"\d+\.\d+", capability):
        if tuple(map(int, capability.split("."))) >= LEAST_CAPABILITY:
            return None
        found = f"{device.device_kind} has {capability}"
    else:
        found = f"this is {device.device_kind}"
    least = ".".join(map(str, LEAST_CAPABILITY))
    return f"fp8 needs an NVIDIA GPU of compute capability {least} or above, and {found}"


def quantize(w_OI: NDArray[np.generic]) -> tuple[NDArray[np.generic], NDArray[np.float32]]:
    """Return weights as eight-bit floats, and the scale of each output.

    Args:
        w_OI: of any floating type; finite.
    """
    wide_OI = w_OI.astype(np.float32)
    magnitudes_O = np.maximum(np.abs(wide_OI).max(axis=1), np.float32(LEAST_MAGNITUDE))
    scale_O = magnitudes_O / np.float32(LARGEST)
    wide_OI /= scale_O[:, None]
    return wide_OI.astype(DTYPE), scale_O


def project(
    x_TI: Float[Array, "T I"], w_OI: Float[Array, "O I"], scale_O: Float[Array, "O"]
) -> Float[Array, "T O"]:
    """Return x · wᵀ in f32, with x rounded to eight-bit floats.

    A row that is not finite gives what is not a number.

    Args:
        x_TI: activations.
        w_OI: as `quantize` gives them.
        scale_O: of the outputs.
    """
    x_TI = x_TI.astype(jnp.float32)
    magnitude_T1 = jnp.maximum(jnp.abs(x_TI).max(axis=1, keepdims=True), LEAST_MAGNITUDE)
    sums_TO = lax.dot_general(
        (x_TI * (LARGEST / magnitude_T1)).astype(DTYPE),
        w_OI,
        (((1,), (1,)), ((), ())),
        # Or cuBLASLt adds up with fewer bits than f32 has.
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    scale_T1 = magnitude_T1 * np.float32(1 / LARGEST)
    # Or the compiler may join the last product with a sum that follows, and round only once.
    product_TO: Array = lax.optimization_barrier(sums_TO * scale_T1 * scale_O)
    return product_TO
