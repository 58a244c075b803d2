"""Products with weights that are packed once, when they are loaded; for CPUs.

XLA's products on the CPU arrange the weights anew at every call, which is most of what they cost
for few tokens. `native_source/projection.cc` is the code and says how packed weights lie; it needs
instructions for bfloat16. A token has the same bits whatever it is computed with.

Letters: T tokens, I inputs, O outputs.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import NDArray

__all__ = ["PROJECT", "can_pack", "pack", "packed_shape", "project", "unpacked_shape"]

PROJECT = "headrace_project"

# Outputs side by side, inputs of a tile, and the outputs that are computed together.
COLUMN, DEPTH, PANEL = 16, 32, 32


def can_pack(num_outputs: int, num_inputs: int) -> bool:
    """Whether weights of this shape can be packed."""
    return num_outputs % PANEL == 0 and num_inputs % DEPTH == 0


def packed_shape(num_outputs: int, num_inputs: int) -> tuple[int, ...]:
    """Return the shape of packed weights."""
    return num_outputs // COLUMN, num_inputs // DEPTH, DEPTH // 2, COLUMN, 2


def unpacked_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the outputs and inputs of weights, packed or not."""
    return (shape[0] * COLUMN, shape[1] * DEPTH) if len(shape) == 5 else (shape[0], shape[1])


def pack(w_OI: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return weights in the order that `project` wants: pairs of inputs, sixteen outputs a time."""
    num_columns, num_tiles, pairs, column, two = packed_shape(*w_OI.shape)
    tiles = w_OI.reshape(num_columns, column, num_tiles, pairs, two)
    return np.ascontiguousarray(tiles.transpose(0, 2, 3, 1, 4))


def project(x_TI: Float[Array, "T I"], w: Float[Array, "_ _ _ _ 2"]) -> Float[Array, "T O"]:
    """Return x · wᵀ in f32, with x rounded to bfloat16; `native.load` must have been called."""
    num_outputs, num_inputs = unpacked_shape(w.shape)
    if x_TI.shape[1] != num_inputs:
        raise ValueError(f"{x_TI.shape[1]} inputs do not fit weights for {num_inputs}")
    result = jax.ShapeDtypeStruct((x_TI.shape[0], num_outputs), jnp.float32)
    projected: Array = jax.ffi.ffi_call(PROJECT, result)(x_TI.astype(jnp.bfloat16), w)
    return projected
