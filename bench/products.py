"""How fast the decoder's products are: of bfloat16, packed and by XLA, and of eight bits.

    python -m bench.products

Every matrix of the default model, with as many tokens as steps have. All sides get activations in
float32, as the decoder has them, and round them themselves. They take turns, so that whatever else
the machine does hits all.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import click
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from bench.environment import describe_environment
from bench.report import open_console, print_rows, write_json
from jaxengine.host_memory import keep_freed_memory
from jaxengine.models.layers import project
from jaxengine.weights.source import cache_dir
from kernels_pallas import int8, native, projection
from kernels_pallas.choice import choose_kernel, kernels_dir
from kernels_pallas.projection import pack, packed_shape

__all__ = ["products"]

RESULT_SCHEMA = "headrace.bench.products/2"
SIDES = ("packed", "xla", "int8")
HEADINGS = (
    *("matrix", "tokens", "bf16 packed\nms, median/min", "bf16 XLA", "int8 packed"),
    *("bf16 / int8", "int8\nGFLOP/s"),
)

# Name, outputs, inputs, and how many of them a step goes through, which are measured together: one
# alone would stay in the nearest caches.
MATRICES = (
    ("qkv", 960, 576, 30),
    ("out", 576, 576, 30),
    ("gate and up", 3072, 576, 30),
    ("down", 576, 1536, 30),
    ("head", 49152, 576, 1),
)
TOKENS = (1, 2, 8, 16, 32, 64, 128, 512)


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds for one product; processor time counts all threads."""

    median_ms: float
    min_ms: float
    cpu_ms: float


def measure(calls: dict[str, Callable[[], object]], count: int, repeats: int) -> dict[str, Timing]:
    """Time calls of `count` products each, in turns."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            call()
            times[name].append((time.perf_counter() - wall_s, time.process_time() - cpu_s))
    return {
        name: Timing(
            median(wall_s for wall_s, _ in measured) / count * 1000,
            min(wall_s for wall_s, _ in measured) / count * 1000,
            min(cpu_s for _, cpu_s in measured) / count * 1000,
        )
        for name, measured in times.items()
    }


class Weights(NamedTuple):
    """A matrix of each layer, as one side wants them.

    Attributes:
        values: of each layer, packed or not.
        scales: of eight bits, for each layer.
    """

    values: list[jax.Array]
    scales: list[jax.Array] | None = None


def _weights(plain: Sequence[NDArray[np.generic]], side: str) -> Weights:
    scales = None
    if side == "int8":
        quantized = [int8.quantize(w) for w in plain]
        plain = [values for values, _ in quantized]
        scales = [jnp.asarray(scale) for _, scale in quantized]
    if side == "xla":
        return Weights([jnp.asarray(w) for w in plain], scales)
    packed = [np.empty(packed_shape(*w.shape, dtype=w.dtype), w.dtype) for w in plain]
    for (place,), w in zip(packed, plain, strict=True):
        pack(w, place)
    return Weights([jnp.asarray(w) for w in packed], scales)


def _multiply(x: jax.Array, weights: Weights, layer: int) -> jax.Array:
    w = weights.values[layer]
    if weights.scales is None:
        return project(x, w) if w.ndim == 2 else projection.project(x, w)
    scale = weights.scales[layer]
    return int8.project(x, w, scale) if w.ndim == 2 else projection.project_int8(x, w, scale)


def _call(weights: Weights, count: int, x: jax.Array) -> Callable[[], object]:
    """Compile products with all weights; return a call that waits for their end."""

    @jax.jit
    def multiply(x: jax.Array, weights: Weights) -> list[jax.Array]:
        # The whole product is computed, but not handed out: that would take fresh memory.
        return [
            jax.lax.optimization_barrier(_multiply(x, weights, layer))[0, :1]
            for layer in range(count)
        ]

    def call() -> object:
        return jax.block_until_ready(multiply(x, weights))

    call()
    return call


@click.command()
@click.option("--repeats", type=click.IntRange(min=1), default=15, show_default=True)
@click.option("--max-tokens", type=int, default=512, show_default=True, help="Leave out more.")
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False), help="Result file.")
def products(repeats: int, max_tokens: int, output_json: Path | None) -> None:
    """Time products of bfloat16, packed and by XLA, and of eight bits."""
    keep_freed_memory()
    choice = choose_kernel("native", platform="cpu", block_size=16, folder=kernels_dir(cache_dir()))
    if not choice.can_project or choice.library is None:
        raise click.ClickException(f"there are no packed products here: {choice.reason}")
    native.load(choice.library)
    rng = np.random.default_rng(0)
    results, rows = [], []
    for name, num_outputs, num_inputs, in_step in MATRICES:
        shape = (num_outputs, num_inputs)
        plain = [rng.standard_normal(shape, np.float32) for _ in range(in_step)]
        plain = [w.astype(jnp.bfloat16) for w in plain]
        weights = {side: _weights(plain, side) for side in SIDES}
        for num_tokens in (tokens for tokens in TOKENS if tokens <= max_tokens):
            x = jnp.asarray(rng.standard_normal((num_tokens, num_inputs), np.float32))
            calls = {side: _call(weights[side], in_step, x) for side in SIDES}
            timings = measure(calls, in_step, repeats)
            sizes = {"outputs": num_outputs, "inputs": num_inputs, "tokens": num_tokens}
            results.append(
                {"matrix": name, "in_step": in_step, **sizes}
                | {side: asdict(timing) for side, timing in timings.items()}
            )
            ours = timings["int8"].median_ms
            rows.append(
                (
                    name,
                    str(num_tokens),
                    *(
                        f"{timing.median_ms:.3f} / {timing.min_ms:.3f}"
                        for timing in timings.values()
                    ),
                    f"{timings['packed'].median_ms / ours:.1f}",
                    f"{2e-6 * num_tokens * num_outputs * num_inputs / ours:.0f}",
                )
            )
    print_rows(open_console(), HEADINGS, rows, choice.reason)
    if output_json is not None:
        document = {
            "schema": RESULT_SCHEMA,
            "environment": describe_environment(sys.argv),
            "native": choice.reason,
            "products": results,
        }
        write_json(output_json, document)


if __name__ == "__main__":
    products()
