"""Products with weights of sixteen and of eight bits: how fast, and whether a row keeps its bits.

XLA times its own kernels against cuBLASLt's for each number of rows, and two of them may add in
different orders. Integers do not care; floats do.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bench.gpu_kernels import Ceilings, time_launches
from jaxengine.models.layers import project
from kernels_pallas import fp8, int8

__all__ = ["ProductSizes", "measure_products"]

# Rows whose bits are compared; no step has fewer.
COMPARED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductSizes:
    """What to measure.

    Attributes:
        num_outputs, num_inputs: of the matrix; those of gate and up of an 8B model.
        num_rows: of activations, ascending.
        repeats: launches that are timed together.
    """

    num_outputs: int = 28672
    num_inputs: int = 4096
    num_rows: tuple[int, ...] = (8, 64, 512, 2048)
    repeats: int = 20


def measure_products(sizes: ProductSizes, ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    """Measure a product with each kind of weights and each number of rows; a row for each.

    Rounding of activations is part of it. `same_bits` says whether the first rows are what they
    are among the most.
    """
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (sizes.num_rows[-1], sizes.num_inputs))
    w = jax.random.normal(keys[1], (sizes.num_outputs, sizes.num_inputs))
    scale = jnp.ones(sizes.num_outputs)
    kinds: Mapping[str, tuple[Callable[..., Array], tuple[Array, ...]]] = {
        "bfloat16": (project, (w.astype(jnp.bfloat16),)),
        "int8": (int8.project, (jnp.round(w * 25).astype(jnp.int8), scale)),
        "fp8": (fp8.project, (w.astype(fp8.DTYPE), scale)),
    }
    for name, (multiply, weights) in kinds.items():
        run = jax.jit(multiply)
        expected = np.asarray(run(x, *weights)[:COMPARED])
        for num_rows in sizes.num_rows:
            rows = x[:num_rows]
            first = np.asarray(run(rows, *weights)[:COMPARED])
            seconds = time_launches(run, (rows, *weights), sizes.repeats)
            num_bytes, flop = weights[0].nbytes, 2 * num_rows * weights[0].size
            yield {
                "weights": name,
                "rows": num_rows,
                "microseconds": seconds * 1e6,
                "share_of_copy": num_bytes / seconds / ceilings.bytes_per_s,
                "teraflop_per_s": flop / seconds / 1e12,
                "share_of_product": flop / seconds / ceilings.flop_per_s,
                "same_bits": bool((first == expected).all()),
            }
