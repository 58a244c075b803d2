"""How fast products are here at best, and how many a token costs.

    python -m bench.comparison.limit MODEL

In a process of its own, while nothing else runs; prints a ProductLimit as JSON. The rate of a
number format is the best that XLA reaches on the largest matrices of the model with many rows.
"""

import time
from dataclasses import asdict

import click
import jax
import jax.numpy as jnp
import numpy as np
import orjson

from bench.comparison.figures import ProductLimit
from jaxengine.host_memory import keep_freed_memory
from jaxengine.models.config import ModelConfig
from jaxengine.weights.checkpoint import open_checkpoint
from jaxengine.weights.source import resolve_model

__all__ = ["limit"]

ROWS = 512
WARM_UPS = 2
REPEATS = 10


def matrix_weights(config: ModelConfig) -> int:
    """Weights that a token is multiplied with, the output projection among them."""
    query = config.num_heads * config.head_dim
    key_value = config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * query + 2 * key_value + 3 * config.intermediate_size)
    return config.num_layers * layer + config.vocab_size * config.hidden_size


def product_gflops(num_outputs: int, num_inputs: int, dtype: np.dtype) -> float:
    """The best rate of x[ROWS, inputs] · w[outputs, inputs]ᵀ, in 1e9 operations a second."""
    accumulated = jnp.int32 if dtype == jnp.int8 else jnp.float32
    rng = np.random.default_rng(0)

    def draw(rows: int) -> jax.Array:
        return jnp.asarray(rng.integers(-8, 8, (rows, num_inputs), np.int8), dtype)

    @jax.jit
    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        contracted = (((1,), (1,)), ((), ()))
        y = jax.lax.dot_general(x, w, contracted, preferred_element_type=accumulated)
        # The whole product is computed, but not handed out: that would take fresh memory.
        first: jax.Array = jax.lax.optimization_barrier(y)[:1]
        return first

    x, w = draw(ROWS), draw(num_outputs)
    times = []
    for _ in range(WARM_UPS + REPEATS):
        start_s = time.perf_counter()
        jax.block_until_ready(multiply(x, w))
        times.append(time.perf_counter() - start_s)
    return 2e-9 * ROWS * num_outputs * num_inputs / min(times[WARM_UPS:])


@click.command()
@click.argument("model")
def limit(model: str) -> None:
    """Measure the products of MODEL."""
    keep_freed_memory()
    config = ModelConfig.from_hf(open_checkpoint(resolve_model(model)).hf_config)
    shapes = (
        (config.vocab_size, config.hidden_size),
        (2 * config.intermediate_size, config.hidden_size),
    )
    rates = {
        name: max(product_gflops(*shape, np.dtype(dtype)) for shape in shapes)
        for name, dtype in (("bf16", jnp.bfloat16), ("int8", jnp.int8))
    }
    result = ProductLimit(
        bf16_gflops=rates["bf16"],
        int8_gflops=rates["int8"],
        matrix_weights=matrix_weights(config),
    )
    click.echo(orjson.dumps(asdict(result)))


if __name__ == "__main__":
    limit()
