"""Products with weights of eight bits: what they are, as NumPy and XLA compute them.

Every output has one scale, its largest weight / 127; so has every row of activations, found when
the row is there. Rows and weights are rotated before that: multiplied by an orthogonal matrix,
which leaves products as they were and spreads what is large in one place, so that next to nothing
of the precision is lost to it. Sums are exact integers, and the scales are multiplied in one order:
`projection.project_int8` gives the same bits.

The matrix is Hadamard's, for 64 inputs at a time: only additions, which nothing can round in two
ways. Where 64 does not divide the inputs, the largest power of two below that does.

Letters: T tokens, I inputs, O outputs.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int8
from numpy.typing import NDArray

__all__ = ["project", "quantize", "rotate"]

MOST_ROTATED = 64
LARGEST = 127
# A row of nothing but numbers below this is scaled as if this were its largest.
LEAST_MAGNITUDE = 1e-30


def quantize(w_OI: NDArray[np.generic]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return weights in eight bits, and the scale of each output.

    Args:
        w_OI: of any floating type; finite.
    """
    rotated_OI = rotate(w_OI.astype(np.float32))
    magnitudes_O = np.abs(rotated_OI).max(axis=1)
    scale_O = np.maximum(magnitudes_O, np.float32(LEAST_MAGNITUDE)) / np.float32(LARGEST)
    rotated_OI /= scale_O[:, None]
    return np.rint(rotated_OI, out=rotated_OI).astype(np.int8), scale_O


def project(
    x_TI: Float[Array, "T I"], w_OI: Int8[Array, "O I"], scale_O: Float[Array, "O"]
) -> Float[Array, "T O"]:
    """Return x · wᵀ in f32, with x rounded to eight bits.

    Args:
        x_TI: activations.
        w_OI: as `quantize` gives them.
        scale_O: of the outputs.
    """
    rounded_TI, scale_T1 = _round_rows(x_TI.astype(jnp.float32))
    sums_TO = lax.dot_general(
        rounded_TI, w_OI, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
    )
    # Or the compiler may join the last product with a sum that follows, and round only once.
    product_TO: Array = lax.optimization_barrier(sums_TO.astype(jnp.float32) * scale_T1 * scale_O)
    return product_TO


def rotate[F: np.floating](rows: NDArray[F]) -> NDArray[F]:
    """Return weights, or activations, rotated; without the rules about their last bits."""
    size = _rotated(rows.shape[1])
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    rotated: NDArray[F] = rows.reshape(-1, size) @ (matrix / math.sqrt(size)).astype(rows.dtype)
    return rotated.reshape(rows.shape)


def _rotated(num_inputs: int) -> int:
    """How many inputs are rotated together."""
    return math.gcd(num_inputs, MOST_ROTATED)


def _round_rows(x_TI: Array) -> tuple[Array, Array]:
    """Return rotated rows in eight bits, and what they must be multiplied with.

    A row that is not finite gets zeros and a scale that is not a number.
    """
    num_tokens, num_inputs = x_TI.shape
    size = _rotated(num_inputs)
    x = x_TI.reshape(num_tokens, -1, size)
    half = size // 2
    while half:
        first, second = jnp.split(x.reshape(num_tokens, -1, 2, half), 2, axis=2)
        x = jnp.concatenate([first + second, first - second], axis=2)
        half //= 2
    x = x.reshape(num_tokens, num_inputs)
    magnitude_T1 = jnp.abs(x).max(axis=1, keepdims=True)
    finite_T1 = jnp.isfinite(magnitude_T1)
    magnitude_T1 = jnp.maximum(magnitude_T1, LEAST_MAGNITUDE)
    rounded = jnp.round(x * (LARGEST / magnitude_T1))
    scale_T1 = magnitude_T1 * np.float32(1 / (LARGEST * math.sqrt(size)))
    return (
        jnp.where(finite_T1, rounded, 0).astype(jnp.int8),
        jnp.where(finite_T1, scale_T1, jnp.nan),
    )
