"""Compile for a GPU that is not there, in a process that has JAX's CUDA plugin on its path.

`python compile_for_gpu.py kernels GPU KERNEL` compiles each entry of the tuning table, and
`python compile_for_gpu.py step KERNEL decode|decodes|mixed` a whole step of a model of 8 billion
weights, or several decode steps at once.
One line of JSON for each.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from gpu_target import compile_for, layer_step
from jaxengine.batch_layout import BatchLayout
from jaxengine.buckets import Bucket
from jaxengine.config import EngineConfig
from jaxengine.kv_cache import new_device_state
from jaxengine.models.config import ModelConfig
from jaxengine.models.decoder import Decoder
from jaxengine.rule_arrays import RuleLayout
from jaxengine.step_programs import make_choose, make_forward, make_steps
from kernels_pallas import mosaic_gpu, triton, tuning
from kernels_pallas.gpu_graphs import LOOPS_IN_GRAPHS
from kernels_pallas.kv_cache import KVCacheDtype
from kernels_pallas.ragged_paged_attention import new_kv_cache

# Where `make gpu-tools` puts the plugin and NVIDIA's assembler.
TOOLS = Path(sys.prefix) / "gpu-tools"

CUSTOM_CALL = r'custom_call_target="(?:__gpu\$xla.gpu.triton|mosaic_gpu_v2)"'

LLAMA_8B = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
)

# Tokens that the windowed layers of Mistral 7B and Gemma 2 see.
WINDOW = 4096

DTYPES: dict[str, tuple[KVCacheDtype, ...]] = {
    "triton": ("bfloat16", "float16", "fp8_e4m3", "int8"),
    "mosaic_gpu": ("bfloat16",),
}


def run_with_tools(dump: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run this file with the tools on its path.

    Args:
        dump: folder for what XLA and Mosaic tell.
        arguments: of the command.

    Returns:
        What it printed.
    """
    cuda = TOOLS / "nvidia" / "cu13"
    root = Path(__file__).parents[1]
    flags = f"--xla_gpu_cuda_data_dir={cuda} --xla_dump_to={dump} {LOOPS_IN_GRAPHS}"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TOOLS), str(root), str(root / "tests")]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags + " --xla_dump_hlo_module_re=jit_(forward|steps)",
        "CUDA_ROOT": str(cuda),
        "MOSAIC_GPU_DUMP_TO": str(dump),
        "MOSAIC_GPU_DUMP_PTXAS": "1",
    }
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    return [json.loads(line) for line in answer.stdout.splitlines()]


def compile_kernels(gpu: str, kernel: str) -> Iterator[dict[str, Any]]:
    """Compile a layer's attention with every entry of the tuning table."""
    head_dims = triton.HEAD_DIMS if kernel == "triton" else mosaic_gpu.HEAD_DIMS
    module: Any = triton if kernel == "triton" else mosaic_gpu
    candidates: Any = tuning.triton_candidates if kernel == "triton" else tuning.mosaic_candidates
    for head_dim, dtype in itertools.product(head_dims, DTYPES[kernel]):
        cache = jax.eval_shape(
            lambda: new_kv_cache(
                num_layers=1,
                num_blocks=1000,
                block_size=16,
                num_kv_heads=8,
                head_dim=head_dim,  # noqa: B023  # called at once
                dtype=dtype,  # noqa: B023
                kernel=kernel,
            )
        )
        _, (q, _, batch, _) = layer_step(cache, num_tokens=128, sliding_window=WINDOW)
        # Pairs of which each entry is in one, and what is in use with all that may become of a
        # score; other dtypes than bfloat16 take what is in use.
        pairs = list(
            itertools.zip_longest(candidates("decode", head_dim), candidates("prefill", head_dim))
        )
        scores = {"sliding_window": WINDOW, "soft_cap": 50.0}
        cases = [*((*pair, {}) for pair in pairs), (*pairs[0], scores)]
        for decode, prefill, options in cases if dtype == "bfloat16" else cases[:1]:
            attend = partial(
                module.attend,
                first_block=jnp.int32(0),
                num_kv_heads=8,
                scale=0.1,
                decode=decode or pairs[0][0],
                prefill=prefill,
                **options,
            )
            compile_for(gpu, attend, q, cache, batch)
            yield {"dtype": dtype, "decode": str(decode), "prefill": str(prefill), **options}


def compile_step(kernel: str, kind: str) -> dict[str, Any]:
    """Compile a step of 64 decodes in all 32 layers; or in 8 four of them, or one of 512 tokens."""
    model = LLAMA_8B if kind == "decode" else replace(LLAMA_8B, num_layers=8)
    config = EngineConfig(
        dtype="bfloat16",
        max_model_len=8192,
        max_num_batched_tokens=512,
        max_num_seqs=64,
        block_size=16,
        num_blocks=8192,
        attention_kernel=kernel,
    )
    bucket = Bucket(512, 64, False) if kind == "mixed" else Bucket(64, 64, True)
    layout = BatchLayout(bucket, config.max_blocks_per_seq, 1)
    decoder = nnx.eval_shape(lambda: Decoder(model, dtype=jnp.bfloat16))
    graph, weights = nnx.split(decoder)
    leaves, tree = jax.tree.flatten(weights)
    state = jax.eval_shape(lambda: new_device_state(model, config))
    forward = make_forward(graph, tree, layout)
    if kind == "decodes":
        rules = RuleLayout(bucket.num_seqs, model.vocab_size, config.max_model_len)
        step: Any = make_steps(forward, make_choose(graph, tree, layout.choice))
        rest = [jax.ShapeDtypeStruct((4, layout.size), jnp.int32), jax.eval_shape(rules.resident)]
    else:
        step = forward
        rest = [jax.ShapeDtypeStruct((layout.size,), jnp.int32)]
    compiled = compile_for(
        "h200", step, leaves, state.kv_cache, state.last_token, *rest, donate=(1,)
    )
    memory = compiled.memory_analysis()
    cache = state.kv_cache.data
    text = compiled.as_text()
    shape = f"bf16[{','.join(map(str, cache.shape))}]"
    return {
        "num_layers": model.num_layers,
        "attention_kernels": len(re.findall(CUSTOM_CALL, text)),
        "cache_bytes": cache.size * cache.dtype.itemsize,
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "cache_copies": sum(
            shape in line.split(" copy(")[0] for line in text.splitlines() if " copy(" in line
        ),
    }


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    results = compile_kernels(*rest) if what == "kernels" else [compile_step(*rest)]
    for result in results:
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
