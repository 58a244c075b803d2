"""Compile for a GPU that is not there, in a process that has JAX's CUDA plugin on its path.

`python compile_for_gpu.py kernels KERNEL GPU` compiles each entry of the tuning table, and
`python compile_for_gpu.py step KERNEL decode|decodes|mixed|eight_bits [NUM_GPUS]` a whole step of a
model of 8 billion weights, or several decode steps at once, of one GPU or of several.
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
from typing import Any, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from collectives import count_collectives
from gpu_target import compile_for, described_gpus, layer_step
from jaxengine.batch_layout import BatchLayout
from jaxengine.buckets import Bucket
from jaxengine.config import EngineConfig, Quantization
from jaxengine.device_mesh import DeviceMesh
from jaxengine.kv_cache import new_device_state
from jaxengine.models.config import ModelConfig
from jaxengine.models.decoder import Decoder
from jaxengine.models.sharding import shard_of
from jaxengine.rule_arrays import RuleLayout
from jaxengine.step_programs import Forwarded, make_choose, make_forward, make_steps
from kernels_pallas import mosaic_gpu, triton, tuning
from kernels_pallas.gpu_graphs import LOOPS_IN_GRAPHS
from kernels_pallas.kv_cache import KVCacheDtype
from kernels_pallas.ragged_paged_attention import new_kv_cache

# Where `make gpu-tools` puts the plugin and NVIDIA's assembler.
TOOLS = Path(sys.prefix) / "gpu-tools"

EIGHT_BITS = "(?:s8|f8e4m3fn)"

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


def run_with_tools(
    dump: Path, *arguments: str, graphs: str = LOOPS_IN_GRAPHS
) -> list[dict[str, Any]]:
    """Run this file with the tools on its path.

    Args:
        dump: folder for what XLA and Mosaic tell.
        arguments: of the command.
        graphs: XLA's flag for what is in CUDA graphs.

    Returns:
        What it printed.
    """
    cuda = TOOLS / "nvidia" / "cu13"
    root = Path(__file__).parents[1]
    flags = f"--xla_gpu_cuda_data_dir={cuda} --xla_dump_to={dump} {graphs}"
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


def compile_eight_bits(kernel: str) -> Iterator[dict[str, Any]]:
    """Compile a step of 64 decodes in one layer with weights of eight bits, of either kind.

    On a device XLA times its own products against cuBLASLt's, and takes the faster ones; here each
    of them is compiled.
    """
    for quantization in get_args(Quantization):
        for use_library in (False, True):
            yield from compile_step(
                kernel, "decode", quantization=quantization, use_library=use_library
            )


def compile_step(
    kernel: str,
    kind: str,
    num_gpus: int = 1,
    *,
    quantization: Quantization | None = None,
    use_library: bool = False,
) -> Iterator[dict[str, Any]]:
    """Compile a step of 64 decodes in all 32 layers; or in 8 four of them, or one of 512 tokens.

    With weights of eight bits a step has one layer. Of several GPUs it has two; of two, the choice
    of the tokens is compiled, too.
    """
    num_layers = 1 if quantization else 2 if num_gpus > 1 else 32 if kind == "decode" else 8
    model = shard_of(replace(LLAMA_8B, num_layers=num_layers), num_gpus)
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
    rules = RuleLayout(bucket.num_seqs, model.vocab_size, config.max_model_len)
    devices = DeviceMesh(described_gpus("h200", num_gpus))
    sharding = devices.weights_sharding
    mesh = None if sharding is None else sharding.mesh
    graph, weights = nnx.split(
        nnx.eval_shape(lambda: Decoder(model, dtype=jnp.bfloat16, quantization=quantization))
    )
    leaves, tree = jax.tree.flatten(weights)
    state = jax.eval_shape(lambda: new_device_state(model, config))

    def sharded(shapes: Any) -> Any:
        """As what each device has lies joined."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (num_gpus * x.shape[0], *x.shape[1:]), x.dtype, sharding=sharding
            ),
            shapes,
        )

    def ints(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.int32)

    forward = devices.spread_forward(make_forward(graph, tree, layout))
    choose = devices.spread_choose(make_choose(graph, tree, layout.choice))
    resident = jax.eval_shape(rules.resident)
    same: Any = (state.last_token, ints(layout.size))
    step: Any = forward
    if kind == "decodes":
        step, same = make_steps(forward, choose), (same[0], ints(4, layout.size), resident)
    compiled = compile_for(
        "h200",
        step,
        *sharded((leaves, state.kv_cache)),
        *devices.describe(same),
        donate=(1,),
        mesh=mesh,
        use_library=use_library,
    )
    memory = compiled.memory_analysis()
    cache = state.kv_cache.data
    text = compiled.as_text()
    shape = f"bf16[{','.join(map(str, cache.shape))}]"
    yield {
        "quantization": quantization,
        "use_library": use_library,
        "num_layers": model.num_layers,
        "attention_kernels": len(re.findall(CUSTOM_CALL, text)),
        "cache_bytes": cache.size * cache.dtype.itemsize,
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "cache_copies": sum(
            shape in line.split(" copy(")[0] for line in text.splitlines() if " copy(" in line
        ),
        "collectives": count_collectives(text),
        # What makes a matrix of eight bits as large as a weight.
        "made_weights": sorted(
            set(re.findall(rf"= {EIGHT_BITS}\[\d{{4,}},\d{{4,}}\]\S* ([\w-]+)\(", text))
        ),
        "products": count_products(text),
    }
    if num_gpus == 2:
        hidden = jax.ShapeDtypeStruct((bucket.num_seqs, model.hidden_size), jnp.float32)
        forwarded = Forwarded(hidden, ints(bucket.num_seqs), ints(layout.choice.size))
        same = devices.describe((state.last_token, forwarded, resident))
        compiled = compile_for("h200", choose, sharded(leaves), *same, mesh=mesh)
        yield {"collectives": count_collectives(compiled.as_text())}


def count_products(text: str) -> dict[str, int]:
    """Count products of two matrices of eight bits in a compiled program.

    The operands are what XLA's kernels take, and what a library is called with.
    """
    kernels = re.findall(r"^%\S+ \((.*)\) -> \S+ \{$\n((?:^ .*\n)+)", text, re.MULTILINE)
    fp8 = [
        body
        for parameters, body in kernels
        if " dot(" in body and "convert" not in body
        if re.fullmatch(r"\S+: f8e4m3fn\[\S+\], \S+: f8e4m3fn\[\S+\]", parameters)
    ]
    library = r'custom_call_target="__cublas\$lt\$matmul'
    return {
        "int8": len(re.findall(r"= s32\[[\d,]+\]\S* dot\(", text)),
        "int8 by cuBLASLt": len(re.findall(rf'= \(s32\[.*{library}"', text)),
        "fp8": len(fp8),
        "fp8 by cuBLASLt": len(re.findall(rf'= \(f32\[.*{library}\$f8".*"HIGHEST"', text)),
    }


if __name__ == "__main__":
    what, kernel, *rest = sys.argv[1:]
    if what == "kernels":
        results = compile_kernels(rest[0], kernel)
    elif rest[0] == "eight_bits":
        results = compile_eight_bits(kernel)
    else:
        results = compile_step(kernel, rest[0], *map(int, rest[1:]))
    for result in results:
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
