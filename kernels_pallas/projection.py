"""Products with weights that are packed once, when they are loaded; for CPUs.

XLA's products on the CPU arrange the weights anew at every call, which is most of what they cost
for few tokens. Packed, the weights are words of four bytes: two or four inputs together, sixteen
outputs side by side. `native_source/bf16_product.cc` multiplies bfloat16 and needs instructions for
it; `native_source/int8_product.cc` multiplies the integers of `kernels_pallas.int8`. A token has
the same bits whatever it is computed with.

This module has the order of packed weights, and single products, as the output projection is one;
`native_layer` has those of the layers. Packed weights have an axis for layers in front.

Letters: T tokens, I inputs, O outputs, L layers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float, Int, Int8, UInt8
from numpy.typing import NDArray

from kernels_pallas import fp8

__all__ = [
    "INT8_PICK_LARGEST",
    "INT8_PROJECT",
    "PANEL",
    "PICK_LARGEST",
    "PROJECT",
    "RowNorm",
    "can_pack",
    "or_no_codes",
    "pack",
    "packed_shape",
    "pick_largest",
    "project",
    "project_int8",
    "unpacked_shape",
]

PROJECT = "headrace_project"
INT8_PROJECT = "headrace_int8_project"
PICK_LARGEST = "headrace_pick_largest"
INT8_PICK_LARGEST = "headrace_int8_pick_largest"


class RowNorm(NamedTuple):
    """A root mean square norm of rows: x / sqrt(mean(x²) + eps) * scale."""

    scale: Float[Array, "I"]
    eps: float


# Outputs side by side, words of a tile, and the outputs that are computed together.
COLUMN, WORDS, PANEL = 16, 16, 32


def can_pack(num_outputs: int, num_inputs: int, *, dtype: DTypeLike = jnp.bfloat16) -> bool:
    """Whether weights of this shape can be packed; of eight-bit floats none."""
    if jnp.dtype(dtype) == fp8.DTYPE:
        return False
    return num_outputs % PANEL == 0 and num_inputs % (WORDS * _per_word(dtype)) == 0


def packed_shape(
    num_outputs: int, num_inputs: int, *, dtype: DTypeLike = jnp.bfloat16, num_layers: int = 1
) -> tuple[int, ...]:
    """Return the shape of packed weights."""
    per_word = _per_word(dtype)
    tiles = num_inputs // (WORDS * per_word)
    return num_layers, num_outputs // COLUMN, tiles, WORDS, COLUMN, per_word


def unpacked_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the outputs and inputs of packed weights."""
    _, columns, tiles, words, column, per_word = shape
    return columns * column, tiles * words * per_word


def pack(w_OI: NDArray[np.generic], packed: NDArray[np.generic]) -> None:
    """Put weights in the order that products want: words of inputs, sixteen outputs a time.

    Args:
        w_OI: the weights, in any order in memory.
        packed: where they go, the part of one layer in packed weights.
    """
    num_columns, num_tiles, words, column, per_word = packed.shape
    # The numbers of a word are moved as one, which is several times faster.
    word = np.dtype(f"u{per_word * packed.itemsize}")
    tiles = np.ascontiguousarray(w_OI, packed.dtype).view(word)
    tiles = tiles.reshape(num_columns, column, num_tiles, words)
    packed.view(word)[..., 0] = tiles.transpose(0, 2, 3, 1)


def project(
    x_TI: Float[Array, "T I"],
    w: Float[Array, "1 _ _ _ _ 2"],
    codes: UInt8[Array, "1 _ _ _ _"] | None = None,
    *,
    norm: RowNorm | None = None,
    wanted_T: Bool[Array, "T"] | None = None,
) -> Float[Array, "T O"]:
    """Return x · wᵀ in f32, with x rounded to bfloat16.

    `native.load` must have been called.

    Args:
        x_TI: rounded to f32 first.
        w: packed weights of one layer.
        codes: their packed codes, if these are kept (`group_codes`).
        norm: what x goes through first.
        wanted_T: rows that are computed, if not all are; what the others hold is not defined.
    """
    result = jax.ShapeDtypeStruct((len(x_TI), unpacked_shape(w.shape)[0]), jnp.float32)
    projected: Array = _call(PROJECT, result, x_TI, (w, or_no_codes(codes)), norm, wanted_T)
    return projected


def project_int8(
    x_TI: Float[Array, "T I"],
    w: Int8[Array, "1 _ _ _ _ 4"],
    scale_O: Float[Array, "O"],
    *,
    norm: RowNorm | None = None,
    wanted_T: Bool[Array, "T"] | None = None,
) -> Float[Array, "T O"]:
    """Return what `int8.project` does, with w as `int8.quantize` makes it.

    `native.load` must have been called. The other arguments are those of `project`.
    """
    result = jax.ShapeDtypeStruct((len(x_TI), unpacked_shape(w.shape)[0]), jnp.float32)
    projected: Array = _call(INT8_PROJECT, result, x_TI, (w, scale_O), norm, wanted_T)
    return projected


def pick_largest(
    x_TI: Float[Array, "T I"],
    w: Array,
    scale_O: Float[Array, "O"] | None,
    codes: UInt8[Array, "1 _ _ _ _"] | None = None,
    *,
    norm: RowNorm | None = None,
    wanted_T: Bool[Array, "T"] | None = None,
) -> Int[Array, "T"]:
    """Return for each row the first output that is largest in what `project` gives.

    Or `project_int8`, if the weights have scales. The products themselves never reach memory. A row
    that is not wanted, or has no number, gets 0.
    """
    result = jax.ShapeDtypeStruct((len(x_TI),), jnp.int32)
    if scale_O is None:
        name, weights = PICK_LARGEST, (w, or_no_codes(codes))
    else:
        name, weights = INT8_PICK_LARGEST, (w, scale_O)
    picked: Array = _call(name, result, x_TI, weights, norm, wanted_T)
    return picked


def or_no_codes(packed: UInt8[Array, "L _ _ _ _"] | None) -> UInt8[Array, "L *_"]:
    """Return packed codes, or those of no layer: a call has an operand for them all the same."""
    return jnp.zeros((0, 0), jnp.uint8) if packed is None else packed


def _call(
    name: str,
    result: jax.ShapeDtypeStruct,
    x_TI: Array,
    weights: tuple[Array, ...],
    norm: RowNorm | None,
    wanted_T: Array | None,
) -> Any:
    num_inputs = unpacked_shape(weights[0].shape)[1]
    if weights[0].shape[0] != 1:
        raise ValueError(f"weights of {weights[0].shape[0]} layers are no single product's")
    if x_TI.shape[1] != num_inputs:
        raise ValueError(f"{x_TI.shape[1]} inputs do not fit weights for {num_inputs}")
    if norm is not None and norm.scale.shape != (num_inputs,):
        raise ValueError(f"a norm of {norm.scale.shape[0]} does not fit {num_inputs} inputs")
    return jax.ffi.ffi_call(name, result)(
        x_TI.astype(jnp.float32),
        jnp.zeros(0, jnp.float32) if norm is None else norm.scale,
        jnp.ones(len(x_TI), jnp.int32) if wanted_T is None else wanted_T.astype(jnp.int32),
        *weights,
        eps=np.float32(0 if norm is None else norm.eps),
    )


def _per_word(dtype: DTypeLike) -> int:
    """How many inputs lie together; instructions want words of four bytes."""
    return 4 if jnp.dtype(dtype) == jnp.int8 else 2
