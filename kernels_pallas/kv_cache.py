"""The KV cache as arrays, and how each dtype stores a number.

Eight-bit floats are kept as their bytes: XLA's CPU backend scatters no other eight-bit type
without a copy of the whole cache in float16. Decoding is total, every byte is a finite number:
what a freed block still holds can be masked by a product with zero.

Letters: T packed tokens, K kv heads, H head dim, ... any leading axes.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float

from kernels_pallas.kernel_names import AttentionKernel

__all__ = [
    "AttentionKernel",
    "KVCache",
    "KVCacheDtype",
    "decode_kv",
    "encode_kv",
    "product_dtype",
    "scale_dtype",
    "storage_dtype",
    "zeros_kv_cache",
]

KVCacheDtype = Literal["bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2", "int8"]

FP8_DTYPES: dict[str, DTypeLike] = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}

LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127

# The largest finite numbers of the dtypes.
LARGEST = {
    "float32": LARGEST_FLOAT32,
    "bfloat16": (2 - 2**-7) * 2.0**127,
    "float16": 65504.0,
    "fp8_e4m3": 448.0,
    "fp8_e5m2": 57344.0,
    "int8": LARGEST_FLOAT32,  # before it is scaled
}

# int8 is symmetric: -128 is not used.
INT8_MAX = 127


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["data", "scales"],
    meta_fields=["dtype", "kernel"],
)
@dataclass(frozen=True)
class KVCache:
    """K and V of all layers and blocks. A pytree; donated to every step, never copied.

    Attributes:
        data: the stored numbers, [layers * blocks, 2, K, block_size, H or more]; the order inside
            a block is the kernel's own.
        scales: factor of each (token, K or V, kv head), laid out as `data` without its last axis;
            None where the dtype has none.
        dtype: how `data` is to be read.
        kernel: the implementation whose layout this is, and which therefore attends over it.
    """

    data: Array
    scales: Array | None
    dtype: KVCacheDtype
    kernel: AttentionKernel


def storage_dtype(dtype: KVCacheDtype) -> jnp.dtype:
    """Return the dtype of `KVCache.data`.

    Raises:
        ValueError: there is no such dtype.
    """
    if dtype not in get_args(KVCacheDtype):
        raise ValueError(
            f"the KV cache has no dtype {dtype!r}, only {', '.join(get_args(KVCacheDtype))}"
        )
    return jnp.dtype("uint8" if dtype in FP8_DTYPES else dtype)


def scale_dtype(dtype: KVCacheDtype) -> jnp.dtype | None:
    """Return the dtype of `KVCache.scales`; None if there are none."""
    return jnp.dtype("bfloat16") if dtype == "int8" else None


def product_dtype(dtype: KVCacheDtype) -> jnp.dtype:
    """Return the dtype of the operands of the attention's products: it holds every stored number.

    The eight-bit formats fit into bfloat16. float16 does not, and f32 is the next that CPUs know.
    """
    return jnp.dtype("float32" if dtype in ("float16", "float32") else "bfloat16")


def zeros_kv_cache(
    shape: tuple[int, ...], *, dtype: KVCacheDtype, kernel: AttentionKernel
) -> KVCache:
    """Return a cache of zeros.

    Args:
        shape: of `data`.
        dtype: how it is to be read; scales come with it where the dtype has some.
        kernel: whose layout it has.
    """
    scales = scale_dtype(dtype)
    return KVCache(
        data=jnp.zeros(shape, storage_dtype(dtype)),
        scales=None if scales is None else jnp.zeros(shape[:-1], scales),
        dtype=dtype,
        kernel=kernel,
    )


def encode_kv(
    x_H: Float[Array, "... H"], dtype: KVCacheDtype
) -> tuple[Array, Float[Array, "..."] | None]:
    """Return keys or values as they are stored, and their scales if the dtype has some.

    Rounds to nearest; what exceeds the range of the dtype becomes its largest finite number, and
    what is not a number becomes zero.
    """
    x_H = x_H.astype(jnp.float32)
    x_H = jnp.clip(jnp.where(jnp.isnan(x_H), 0.0, x_H), -LARGEST[dtype], LARGEST[dtype])
    if dtype == "int8":
        # The scale is rounded before it is used, so its own precision costs nothing: the largest
        # element lands at most half a step above 127. A cast to bfloat16 and back would not do,
        # XLA drops such pairs.
        largest = jnp.abs(x_H).max(-1)
        scale = lax.reduce_precision(largest / INT8_MAX, exponent_bits=8, mantissa_bits=7)
        step = scale[..., None]
        steps_H = jnp.round(jnp.where(step > 0, x_H / step, 0.0))
        return jnp.clip(steps_H, -INT8_MAX, INT8_MAX).astype(jnp.int8), scale.astype(jnp.bfloat16)
    if dtype in FP8_DTYPES:
        return lax.bitcast_convert_type(x_H.astype(FP8_DTYPES[dtype]), jnp.uint8), None
    return x_H.astype(storage_dtype(dtype)), None


def decode_kv(data_H: Array, dtype: KVCacheDtype) -> Float[Array, "... H"]:
    """Return stored numbers, without their scales, in the dtype of the products; exactly."""
    if dtype in FP8_DTYPES:
        return _decode_fp8(data_H, dtype)
    return data_H.astype(product_dtype(dtype))


def _decode_fp8(bits: Array, dtype: KVCacheDtype) -> Float[Array, "..."]:
    """Return bytes as bfloat16, by way of float16: faster than XLA's own conversion.

    Both formats are float16 with fewer bits: e5m2 is its upper byte, e4m3 has a shorter exponent
    with a bias of 7 instead of 15. Patterns of infinity and NaN, which are never written, read as
    the largest number.
    """
    largest, shift, factor = (0x7E, 7, 2.0**8) if dtype == "fp8_e4m3" else (0x7B, 8, 1.0)
    wide = bits.astype(jnp.uint16)
    magnitude = jnp.minimum(wide & 0x7F, largest) << shift
    half = lax.bitcast_convert_type(magnitude | (wide & 0x80) << 8, jnp.float16)
    value = half.astype(jnp.float32) * factor
    # bfloat16 is the upper half of f32. The lower is zero here, so there is nothing to round.
    upper = lax.bitcast_convert_type(value, jnp.uint32) >> 16
    return lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
