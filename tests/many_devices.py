"""Runs on several devices, which XLA makes of a CPU at the start of a process: one of their own.

`python many_devices.py NAME[,ARGUMENT] ...` prints what each of these functions returns, as JSON.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from attention_kernels import can_project, ready_kernel
from attention_scene import Cache, Chunk, random_context, shuffled_blocks
from collectives import COLLECTIVES, count_collectives
from compile_cache import use_compile_cache, without_compile_cache
from engine_builder import ENGINE_CONFIG, RandomCheckpoint, WarmRunner
from golden_model import GOLDEN_DIR, TINY_DIR, default_model_files, tiny_model_files
from jaxengine.build import build_engine
from jaxengine.device_mesh import open_mesh
from jaxengine.engine_options import EngineOptions
from jaxengine.model_runner import JaxModelRunner
from jaxengine.models.config import ModelConfig
from jaxengine.models.shard_loader import load_shards
from jaxengine.models.sharding import AXIS, add_up, shard_of
from jaxengine.sampling_params import SamplingParams
from jaxengine.weights.checkpoint import Checkpoint, open_checkpoint
from kernels_pallas.kernel_names import WantedKernel
from kernels_pallas.kv_cache import KVCache
from kernels_pallas.ragged_paged_attention import ragged_paged_attention, write_kv

# Even a quarter of the heads, of the MLP and of the vocabulary can be packed.
PACKABLE = {"head_dim": 64, "intermediate_size": 128, "vocab_size": 512}

# Two programs, so that it starts soon.
SMALL = replace(
    ENGINE_CONFIG, max_num_seqs=8, max_num_batched_tokens=64, token_buckets=(64,), num_blocks=100
)


def run_on_devices(num_devices: int, *calls: str) -> dict[str, Any]:
    """Run this file with so many devices; return what each call returned."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count="
    answer = subprocess.run(
        [sys.executable, "-W", "error", __file__, *calls],
        env={**os.environ, "XLA_FLAGS": f"{flags}{num_devices}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    return dict(zip(calls, json.loads(answer.stdout), strict=True))


def warm_shards(
    checkpoint: Checkpoint,
    *,
    kernel: WantedKernel = "auto",
    packed: bool = False,
    programs_dir: Path | None = None,
    **changes: Any,
) -> WarmRunner:
    """A model on all devices that there are, in few buckets."""
    config = replace(SMALL, attention_kernel=ready_kernel(kernel), **changes)
    model = ModelConfig.from_hf(checkpoint.hf_config)
    mesh = open_mesh(len(jax.devices()))
    shard = shard_of(model, mesh.num_devices)
    decoder = load_shards(
        model,
        checkpoint,
        sharding=mesh.weights_sharding,
        dtype=config.dtype,
        packed=packed,
    )
    runner = JaxModelRunner(decoder, shard, config, devices=mesh, programs_dir=programs_dir)
    runner.warm_up()
    return WarmRunner(runner, shard, config)


def tiny_answers(family: str, kernel: WantedKernel) -> list[list[int]]:
    """Greedy answers to the golden prompts of a family."""
    golden = np.load(TINY_DIR / family / "golden.npz")
    prompts = [golden[f"prompt_{name}"].tolist() for name in "01"]
    params = [
        SamplingParams(max_tokens=len(golden[f"greedy_{name}"]), temperature=0, ignore_eos=True)
        for name in "01"
    ]
    warm = warm_shards(open_checkpoint(tiny_model_files(family)), kernel=kernel)
    return [list(answer) for answer in warm.session().run(prompts, params)]


def golden_answers() -> list[list[int]]:
    """Greedy answers of the default model to all golden prompts, served together."""
    text = (GOLDEN_DIR / "golden_smollm2.json").read_text(encoding="utf-8")
    cases = json.loads(text)["cases"]
    params = [SamplingParams(max_tokens=len(case["output_ids"]), temperature=0) for case in cases]
    warm = warm_shards(open_checkpoint(default_model_files()))
    return [list(a) for a in warm.session().run([c["prompt_ids"] for c in cases], params)]


def neighbours() -> dict[str, Any]:
    """Tokens and log-probabilities of requests that are computed alone, and in other ways.

    As a server here would compute them, with packed weights where there are any.
    """
    checkpoint = RandomCheckpoint(num_key_value_heads=1, **PACKABLE)
    warm = warm_shards(checkpoint, packed=can_project(), dtype="bfloat16")
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 298, length).tolist() for length in (1, 7, 33, 65, 100, 40, 3, 90)]
    params = [
        SamplingParams(max_tokens=10, temperature=i % 2 * 0.8, seed=i, ignore_eos=True, logprobs=2)
        for i in range(8)
    ]

    def run(prompts: list[list[int]], params: list[SamplingParams], **way: Any) -> list[str]:
        outputs = warm.session(**way).run_outputs(prompts, params)
        return [repr((output.new_token_ids, output.new_logprobs)) for output in outputs]

    plain = {"overlap": False, "enable_prefix_caching": False}
    alone = [
        run([prompt], [param], **plain)[0] for prompt, param in zip(prompts, params, strict=True)
    ]
    ways = {
        "together": {},
        "chunks of 16": {"max_num_scheduled_tokens": 16},
        "preempted": {"num_blocks": 24},
    }
    answers = {way: run(prompts, params, **changes) for way, changes in ways.items()}
    warm.runner.reset()
    answers["reset"] = run(prompts, params)
    return {
        "alone": alone,
        "answers": answers,
        "compiles_after_ready": warm.runner.compiles_after_ready,
    }


def programs(kernel: WantedKernel) -> dict[str, Any]:
    """What the compiled step of two layers has in it, and what it does with the cache.

    Layers with packed weights, which go with the native kernel, are a loop.
    """
    packed = ready_kernel(kernel) == "native" and can_project()
    checkpoint = RandomCheckpoint(num_key_value_heads=4, **PACKABLE)
    # Large enough to tell a copy of the cache from everything else.
    warm = warm_shards(checkpoint, kernel=kernel, packed=packed, dtype="bfloat16", num_blocks=2000)
    runner = warm.runner
    cache = runner._state.kv_cache.data
    [part] = {shard.data.shape for shard in cache.addressable_shards}
    sizes = ",".join(map(str, part))
    found = {}
    compiled = {("decode" if b.decode_only else "mixed"): p for b, p in runner._forward.items()}
    [compiled["choice"]] = runner._choose.values()
    for name, program in compiled.items():
        text = program.as_text()
        memory = program.memory_analysis()
        found[name] = {
            "collectives": count_collectives(text),
            "of_the_cache": [
                line
                for line in text.splitlines()
                if sizes in line.split("(")[0] and (COLLECTIVES.search(line) or " copy(" in line)
            ],
            "aliased_bytes": memory.alias_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
        }
    return {
        "layers_in_text": 1 if packed else 2,
        "cache_shape": part,
        "cache_bytes": cache.nbytes // len(jax.devices()),
        "devices": sorted(shard.device.id for shard in cache.addressable_shards),
        "programs": found,
    }


def second_start() -> list[list[int]]:
    """Answers of a start that compiles, and of one that must find its programs."""
    checkpoint, params = RandomCheckpoint(num_hidden_layers=1), SamplingParams(max_tokens=5)
    answers = []
    with tempfile.TemporaryDirectory() as folder, without_compile_cache():
        for lower in (JaxModelRunner.lower, None):
            with patch.object(JaxModelRunner, "lower", lower):
                warm = warm_shards(checkpoint, programs_dir=Path(folder))
            answers.append(list(warm.session().run([[1, 2, 3]], [params])[0]))
    return answers


def built() -> dict[str, Any]:
    """What an engine on all devices says about itself."""
    options = EngineOptions(
        dtype="float32",
        attention_kernel="reference",
        tensor_parallel_size=len(jax.devices()),
        max_num_seqs=8,
        max_num_batched_tokens=16,
        block_size=16,
        num_kv_blocks=20,
    )
    engine = build_engine(RandomCheckpoint(num_hidden_layers=1), options, memory_bytes=1 << 30)
    return {
        "weights": engine.memory.weights,
        "kv_cache": engine.memory.kv_cache,
        "vocab_size": engine.engine.limits.vocab_size,
        "is_described": jax.tree.map(
            lambda x: (x.shape, x.dtype, x.sharding),
            engine.devices.describe_state(engine.shard, engine.config),
        )
        == jax.tree.map(
            lambda x: (x.shape, x.dtype, x.sharding),
            engine.devices.new_state(engine.shard, engine.config),
        ),
        "heads": [engine.model.num_heads, engine.shard.num_heads],
    }


def sums() -> bool:
    """Whether what the shards have is added up in their order, bit by bit."""
    devices = jax.devices()
    mesh = Mesh(devices, (AXIS,))
    rng = np.random.default_rng(0)
    parts = rng.standard_normal((len(devices), 9, 64), np.float32)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    add = jax.jit(
        jax.shard_map(
            partial(lambda x, n: add_up(x[0], n), n=len(devices)),
            mesh=mesh,
            in_specs=PartitionSpec(AXIS),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
    return bool((np.asarray(add(jnp.asarray(parts))) == total).all())


def attention(kernel: WantedKernel) -> bool:
    """Whether devices with a part of the heads write and attend as one with all, bit by bit."""
    if kernel == "native":
        ready_kernel(kernel)
    scene = Cache(num_tokens=64, num_seqs=8, dtype="bfloat16", kernel=kernel)
    contexts = [random_context(i, 60, heads=8, kv_heads=4) for i in range(3)]
    blocks = shuffled_blocks(0, [4] * 3, scene.num_blocks)
    ends = [(10, 50), (59, 60), (30, 31)]
    chunks = [
        Chunk(context, *end, own) for context, end, own in zip(contexts, ends, blocks, strict=True)
    ]
    chunks = sorted(chunks, key=lambda chunk: chunk.end - chunk.start > 1)
    q, batch = jax.tree.map(jnp.asarray, scene.pack(chunks))
    new = np.random.default_rng(9).standard_normal((2, scene.num_tokens, 4, 64), np.float32)

    def step(q: Array, cache: KVCache, new: Array) -> tuple[Array, KVCache]:
        place = jnp.int32(0)
        cache = write_kv(cache, new[0], new[1], batch.slot_mapping, first_block=place)
        heads = cache.data.shape[2]
        attended = ragged_paged_attention(
            q, cache, batch, first_block=place, num_kv_heads=heads, scale=0.125
        )
        return attended, cache

    heads, cache_heads = PartitionSpec(None, AXIS), PartitionSpec(None, None, AXIS)
    spread = jax.shard_map(
        step,
        mesh=Mesh(jax.devices(), (AXIS,)),
        in_specs=(heads, cache_heads, cache_heads),
        out_specs=(heads, cache_heads),
        check_vma=False,
    )
    inputs = (q, scene.filled(chunks), new)
    found, expected = jax.jit(spread)(*inputs), jax.jit(step)(*inputs)
    return all(
        bool((np.asarray(ours) == np.asarray(theirs)).all())
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    )


RUNS: Mapping[str, Any] = {
    function.__name__: function
    for function in (
        *(tiny_answers, golden_answers, neighbours, programs, second_start, built, sums),
        attention,
    )
}

if __name__ == "__main__":
    use_compile_cache()
    results = []
    for call in sys.argv[1:]:
        name, *arguments = call.split(",")
        results.append(RUNS[name](*arguments))
    json.dump(results, sys.stdout)
