"""Building blocks of the decoder, as Flax NNX modules over packed tokens.

Letters: T packed tokens, N query heads, K kv heads, H head dim, D model, F hidden, V vocab.
"""

import math

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, Int, UInt8

from jaxengine.models.config import Llama3RopeScaling, ModelConfig
from kernels_pallas import fp8, int8, projection
from kernels_pallas.group_codes import CodeBits, packed_codes_shape

__all__ = [
    "Linear",
    "RMSNorm",
    "apply_rope",
    "is_packed",
    "new_weight",
    "project",
    "rope_frequencies",
    "rope_tables",
    "row_mean",
    "row_sum",
    "values",
]

# Columns of the ones that turn a row sum into a product (see row_sum).
SUM_COLUMNS = 8


class RMSNorm(nnx.Module):
    """Root mean square norm over the last axis, in f32."""

    def __init__(self, size: int, *, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
        return x * lax.rsqrt(row_mean(x * x) + self.eps) * self.scale[...]


class Linear(nnx.Module):
    """x · Wᵀ (+ b), with a weight as `new_weight` makes it, and its scales where it has some.

    A packed one in bfloat16 may have its codes beside it (kernels_pallas.group_codes).
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        bias: bool,
        dtype: DTypeLike,
        packed: bool,
        code_bits: CodeBits | None = None,
    ) -> None:
        self.weight = nnx.Param(new_weight(out_size, in_size, dtype=dtype, packed=packed))
        bits = code_bits if is_packed(self.weight.shape) else None
        self.codes = None if bits is None else nnx.Param(new_codes(out_size, in_size, bits=bits))
        has_scales = jnp.dtype(dtype) in (jnp.int8, fp8.DTYPE)
        self.weight_scale = nnx.Param(jnp.ones((out_size,), jnp.float32)) if has_scales else None
        self.bias = nnx.Param(jnp.zeros((out_size,), jnp.float32)) if bias else None

    def __call__(
        self,
        x_TI: Float[Array, "T I"],
        *,
        norm: RMSNorm | None = None,
        wanted_T: Bool[Array, "T"] | None = None,
    ) -> Float[Array, "T O"]:
        """Return the product in f32; x is rounded to the dtype of the weight.

        Args:
            x_TI: the left operand, in f32.
            norm: what x goes through first. A packed weight does it on the way.
            wanted_T: rows that matter, if not all do. A packed weight leaves out the others.
        """
        if is_packed(self.weight.shape):
            y_TO = self._packed(x_TI, norm, wanted_T)
        else:
            y_TO = self._plain(x_TI, norm)
        return y_TO if self.bias is None else y_TO + self.bias[...]

    def pick_largest(
        self, x_TI: Float[Array, "T I"], *, norm: RMSNorm, wanted_T: Bool[Array, "T"]
    ) -> Int[Array, "T"]:
        """Return the first of each row's largest outputs; for a packed weight without a bias."""
        w, scale_O, codes = self.weight[...], values(self.weight_scale), values(self.codes)
        rows = projection.RowNorm(norm.scale[...], norm.eps)
        return projection.pick_largest(x_TI, w, scale_O, codes, norm=rows, wanted_T=wanted_T)

    def _packed(self, x_TI: Array, norm: RMSNorm | None, wanted_T: Array | None) -> Array:
        w = self.weight[...]
        rows = None if norm is None else projection.RowNorm(norm.scale[...], norm.eps)
        if self.weight_scale is None:
            codes = values(self.codes)
            return projection.project(x_TI, w, codes, norm=rows, wanted_T=wanted_T)
        scale_O = self.weight_scale[...]
        return projection.project_int8(x_TI, w, scale_O, norm=rows, wanted_T=wanted_T)

    def _plain(self, x_TI: Array, norm: RMSNorm | None) -> Array:
        x_TI = x_TI if norm is None else norm(x_TI)
        if self.weight_scale is None:
            return project(x_TI, self.weight[...])
        multiply = fp8.project if self.weight[...].dtype == fp8.DTYPE else int8.project
        return multiply(x_TI, self.weight[...], self.weight_scale[...])


def new_weight(out_size: int, in_size: int, *, dtype: DTypeLike, packed: bool) -> Array:
    """Return zeros for the weight of a product.

    It is as Hugging Face stores it, [out, in], which is two to three times faster on the CPU than
    [in, out]; or, if so wished and its size allows it, packed for kernels_pallas.projection.
    """
    if packed and projection.can_pack(out_size, in_size, dtype=dtype):
        return jnp.zeros(projection.packed_shape(out_size, in_size, dtype=dtype), dtype)
    return jnp.zeros((out_size, in_size), dtype)


def new_codes(out_size: int, in_size: int, *, bits: CodeBits) -> UInt8[Array, "1 _ _ _ _"]:
    """Return zeros for the packed codes of a packed weight."""
    return jnp.zeros(packed_codes_shape(out_size, in_size, bits=bits), jnp.uint8)


def values(parameter: nnx.Param[Array] | None) -> Array | None:
    """Return what a parameter holds, if there is one."""
    return None if parameter is None else parameter[...]


def is_packed(shape: tuple[int, ...]) -> bool:
    """Whether a parameter of that shape is a weight packed for kernels_pallas.projection."""
    return len(shape) > 2


def project(x_TI: Float[Array, "T I"], w_OI: Float[Array, "O I"]) -> Float[Array, "T O"]:
    """Return x · wᵀ, with x rounded to the dtype of w and sums in f32."""
    return lax.dot_general(
        x_TI.astype(w_OI.dtype),
        w_OI,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if w_OI.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def row_sum(x_TC: Float[Array, "T C"]) -> Float[Array, "T"]:
    """Return the sum of each row, in an order that does not depend on the number of rows.

    XLA orders a plain reduction by the fusion that it lands in, so its last bits can change with
    the bucket. A product with ones does not, in any bucket.
    """
    return project(x_TC, jnp.ones((SUM_COLUMNS, x_TC.shape[-1]), jnp.float32))[:, 0]


def row_mean(x: Float[Array, "*B C"]) -> Float[Array, "*B 1"]:
    """Return the mean over the last axis, summed as `row_sum` does."""
    total = row_sum(x.reshape(-1, x.shape[-1]))
    return (total / x.shape[-1]).reshape(*x.shape[:-1], 1)


def rope_frequencies(config: ModelConfig) -> tuple[float, ...]:
    """Return the H/2 rotation frequencies, in radians per position."""
    half = config.head_dim // 2
    frequencies = [config.rope_theta ** (-i / half) for i in range(half)]
    if config.rope_scaling is None:
        return tuple(frequencies)
    return tuple(_scale_llama3(f, config.rope_scaling) for f in frequencies)


def _scale_llama3(frequency: float, scaling: Llama3RopeScaling) -> float:
    """Stretch long wavelengths by `factor`, keep short ones, and blend in between."""
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    if turns < scaling.low_freq_factor:
        return frequency / scaling.factor
    if turns > scaling.high_freq_factor:
        return frequency
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - blend) * frequency / scaling.factor + blend * frequency


def rope_tables(
    positions_T: Int[Array, "T"], frequencies: tuple[float, ...]
) -> tuple[Float[Array, "T 1 H/2"], Float[Array, "T 1 H/2"]]:
    """Return cosines and sines of the rotation of each token, in f32; computed once per step."""
    angles = positions_T[:, None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]


def apply_rope(
    x_TNH: Float[Array, "T N H"],
    rope: tuple[Float[Array, "T 1 H/2"], Float[Array, "T 1 H/2"]],
) -> Float[Array, "T N H"]:
    """Rotate the first half of each head against the second (the "neox" pairing)."""
    cos, sin = rope
    first, second = jnp.split(x_TNH, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
