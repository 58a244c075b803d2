"""What the compiled programs of a step do with the cache and the weights."""

import math
import re
from dataclasses import replace

import jax
import pytest

from attention_kernels import can_project, ready_kernel
from attention_scene import KV_CACHE_DTYPES
from engine_builder import ENGINE_CONFIG, packed_decoder, random_decoder
from jaxengine.batch_layout import BatchLayout
from jaxengine.buckets import Bucket
from jaxengine.kv_cache import kv_block_bytes, new_device_state
from jaxengine.model_runner import JaxModelRunner


@pytest.mark.parametrize(
    ("kv_cache_dtype", "bucket"),
    [
        ("bfloat16", Bucket(16, 16, True)),
        *((dtype, Bucket(64, 16, False)) for dtype in KV_CACHE_DTYPES),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", ["reference", "auto"])
def test_the_cache_is_updated_in_place_and_never_copied(kv_cache_dtype, bucket, kernel):
    check_in_place(*random_decoder("bfloat16"), kv_cache_dtype, bucket, ready_kernel(kernel))


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("model_type", ["qwen2", "gemma2"])
def test_nor_is_it_in_packed_layers_nor_are_their_weights(model_type, kv_cache_dtype):
    if not can_project():
        pytest.skip("no compiler here, or no instructions for bfloat16")
    decoder, model = packed_decoder(model_type=model_type)
    compiled = check_in_place(decoder, model, kv_cache_dtype, Bucket(64, 16, False), "native")
    weights = decoder.stack.mlp.down_proj.weight[...]
    shape = re.escape(",".join(map(str, weights.shape)))
    made = set(re.findall(rf"= bf16\[{shape}\]\S* ([\w-]+)\(", compiled.as_text()))
    # Gemma's norms behind the halves are in a loop over the layers, others are a single call.
    assert made == {"parameter"} | ({"get-tuple-element"} if model_type == "gemma2" else set())


def check_in_place(decoder, model, kv_cache_dtype, bucket, kernel):
    """Compile a step and look at all that it makes; return the program."""
    # Large enough to tell a copy from everything else in the step.
    config = replace(
        ENGINE_CONFIG,
        num_blocks=2000,
        dtype="bfloat16",
        kv_cache_dtype=kv_cache_dtype,
        attention_kernel=kernel,
    )
    runner = JaxModelRunner(decoder, model, config)
    layout = BatchLayout(bucket, config.max_blocks_per_seq, len(model.eos_token_ids))
    compiled = runner.lower(layout).compile()
    state = jax.eval_shape(lambda: new_device_state(model, config))
    sizes = {array.size for array in jax.tree.leaves(state.kv_cache)}
    num_elements = max(sizes)
    memory = compiled.memory_analysis()
    block_bytes = kv_block_bytes(model, block_size=16, dtype=kv_cache_dtype, kernel=kernel)
    assert memory.alias_size_in_bytes >= 2000 * block_bytes
    assert memory.temp_size_in_bytes < num_elements / 4
    whole = [
        operation
        for shape, operation in re.findall(r"= \w+\[([\d,]+)\]\S* ([\w-]+)\(", compiled.as_text())
        if (size := math.prod(map(int, shape.split(",")))) >= num_elements or size in sizes
    ]
    # A foreign function that writes data and scales returns both at once.
    writes = {"scatter", "custom-call", "get-tuple-element"}
    assert writes & set(whole), "the pattern no longer finds the cache"
    copies = {"copy", "copy-start", "convert", "bitcast-convert", "transpose", "pad"}
    assert not copies & set(whole)
    return compiled
