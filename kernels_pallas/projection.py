"""Products with weights that are packed once, when they are loaded; for CPUs.

XLA's products on the CPU arrange the weights anew at every call, which is most of what they cost
for few tokens. `native_source/projection.cc` is the code and says how packed weights lie; it needs
instructions for bfloat16. A token has the same bits whatever it is computed with.

Weights of several layers lie in one array, and a product is told which of them is meant: a program
can then go through the layers in a loop without a copy of their weights.

Letters: T tokens, I inputs, O outputs, L layers.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray

__all__ = ["PROJECT", "can_pack", "pack", "packed_shape", "project", "unpacked_shape"]

PROJECT = "headrace_project"

# Outputs side by side, inputs of a tile, and the outputs that are computed together.
COLUMN, DEPTH, PANEL = 16, 32, 32


def can_pack(num_outputs: int, num_inputs: int) -> bool:
    """Whether weights of this shape can be packed."""
    return num_outputs % PANEL == 0 and num_inputs % DEPTH == 0


def packed_shape(num_outputs: int, num_inputs: int, *, num_layers: int = 1) -> tuple[int, ...]:
    """Return the shape of packed weights."""
    return num_layers, num_outputs // COLUMN, num_inputs // DEPTH, DEPTH // 2, COLUMN, 2


def unpacked_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the outputs and inputs of packed weights."""
    return shape[1] * COLUMN, shape[2] * DEPTH


def pack(w_OI: NDArray[np.generic], packed: NDArray[np.generic]) -> None:
    """Put weights in the order that `project` wants: pairs of inputs, sixteen outputs a time.

    Args:
        w_OI: the weights, in any order in memory.
        packed: where they go, the part of one layer in packed weights.
    """
    num_columns, num_tiles, pairs, column, _ = packed.shape
    # Two numbers are moved as one, which is several times faster.
    pair = np.dtype(f"u{2 * packed.itemsize}")
    tiles = np.ascontiguousarray(w_OI, packed.dtype).view(pair)
    tiles = tiles.reshape(num_columns, column, num_tiles, pairs)
    packed.view(pair)[..., 0] = tiles.transpose(0, 2, 3, 1)


def project(
    x_TI: Float[Array, "T I"], w: Float[Array, "L _ _ _ _ 2"], layer: Int[Array, ""] | int = 0
) -> Float[Array, "T O"]:
    """Return x · w[layer]ᵀ in f32, with x rounded to bfloat16.

    `native.load` must have been called.
    """
    num_outputs, num_inputs = unpacked_shape(w.shape)
    if x_TI.shape[1] != num_inputs:
        raise ValueError(f"{x_TI.shape[1]} inputs do not fit weights for {num_inputs}")
    result = jax.ShapeDtypeStruct((x_TI.shape[0], num_outputs), jnp.float32)
    call = jax.ffi.ffi_call(PROJECT, result)
    projected: Array = call(x_TI.astype(jnp.bfloat16), w, jnp.asarray(layer, jnp.int32))
    return projected
