"""Products with weights that are packed once, when they are loaded; for CPUs.

XLA's products on the CPU arrange the weights anew at every call, which is most of what they cost
for few tokens. Packed, the weights are words of four bytes: two or four inputs together, sixteen
outputs side by side. `native_source/projection.cc` multiplies bfloat16 and needs instructions for
it; `native_source/int8_projection.cc` multiplies the integers of `kernels_pallas.int8`. A token has
the same bits whatever it is computed with.

Letters: T tokens, I inputs, O outputs, L layers, ... a layer's packed weights.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int, Int8
from numpy.typing import NDArray

__all__ = [
    "INT8_PROJECT",
    "PROJECT",
    "can_pack",
    "pack",
    "packed_shape",
    "project",
    "project_int8",
    "unpacked_shape",
]

PROJECT = "headrace_project"
INT8_PROJECT = "headrace_int8_project"

# Outputs side by side, words of a tile, and the outputs that are computed together.
COLUMN, WORDS, PANEL = 16, 16, 32
WORD_BYTES = 4


def can_pack(num_outputs: int, num_inputs: int, dtype: DTypeLike) -> bool:
    """Whether weights of this shape can be packed."""
    return num_outputs % PANEL == 0 and num_inputs % (WORDS * _per_word(dtype)) == 0


def packed_shape(num_outputs: int, num_inputs: int, dtype: DTypeLike) -> tuple[int, ...]:
    """Return the shape of packed weights."""
    per_word = _per_word(dtype)
    return num_outputs // COLUMN, num_inputs // (WORDS * per_word), WORDS, COLUMN, per_word


def unpacked_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the outputs and inputs of weights, packed or not."""
    if len(shape) == 2:
        return shape[0], shape[1]
    columns, tiles, words, column, per_word = shape
    return columns * column, tiles * words * per_word


def pack(w_OI: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return weights in the order that products of their dtype want."""
    num_outputs, num_inputs = w_OI.shape
    shape = packed_shape(num_outputs, num_inputs, w_OI.dtype)
    columns, tiles, words, column, per_word = shape
    numbers = w_OI.reshape(columns, column, tiles, words, per_word)
    return np.ascontiguousarray(numbers.transpose(0, 2, 3, 1, 4))


def project(x_TI: Float[Array, "T I"], w: Float[Array, "_ _ _ _ 2"]) -> Float[Array, "T O"]:
    """Return x · wᵀ in f32, with x rounded to bfloat16; `native.load` must have been called."""
    result = _result(x_TI, w.shape)
    projected: Array = jax.ffi.ffi_call(PROJECT, result)(x_TI.astype(jnp.bfloat16), w)
    return projected


def project_int8(
    x_TI: Float[Array, "T I"],
    w: Int8[Array, "_ _ _ _ 4"] | Int8[Array, "L _ _ _ _ 4"],
    scale: Float[Array, "O"] | Float[Array, "L O"],
    *,
    layer: Int[Array, ""] | None = None,
) -> Float[Array, "T O"]:
    """Return what `int8.project` does; `native.load` must have been called.

    Args:
        x_TI: activations.
        w: weights as `int8.quantize` makes them, packed; or those of several layers.
        scale: of each output.
        layer: whose weights to take, where there are several.
    """
    result = _result(x_TI, w.shape[-5:])
    index = jnp.int32(0) if layer is None else layer
    projected: Array = jax.ffi.ffi_call(INT8_PROJECT, result)(
        x_TI.astype(jnp.float32), w, scale, index
    )
    return projected


def _result(x_TI: Array, weights_shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    num_outputs, num_inputs = unpacked_shape(weights_shape)
    if x_TI.shape[1] != num_inputs:
        raise ValueError(f"{x_TI.shape[1]} inputs do not fit weights for {num_inputs}")
    return jax.ShapeDtypeStruct((x_TI.shape[0], num_outputs), jnp.float32)


def _per_word(dtype: DTypeLike) -> int:
    return WORD_BYTES // np.dtype(dtype).itemsize
