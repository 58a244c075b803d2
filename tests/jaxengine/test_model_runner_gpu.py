"""Whole steps for GPUs that are not there: those of every bucket, and those of a large model."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from compile_for_gpu import TOOLS, run_with_tools
from gpu_target import lower_for
from jaxengine.batch_layout import BatchLayout
from jaxengine.buckets import buckets_for
from jaxengine.config import EngineConfig
from jaxengine.kv_cache import new_device_state
from jaxengine.models.config import ModelConfig
from jaxengine.models.decoder import Decoder
from jaxengine.rule_arrays import RuleLayout
from jaxengine.step_programs import make_choose, make_forward, make_steps
from kernels_pallas.gpu_graphs import LOOPS_IN_GRAPHS

ONE_LAYER = ModelConfig(
    family="qwen3",
    vocab_size=256,
    hidden_size=256,
    intermediate_size=256,
    num_layers=1,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    tie_embeddings=True,
    qk_norm=True,
)


@pytest.mark.filterwarnings("ignore:.*Pallas Triton:DeprecationWarning")
@pytest.mark.parametrize("kernel", ["mosaic_gpu", "triton"])
def test_the_step_of_every_bucket_lowers_for_a_gpu(kernel):
    config = EngineConfig(attention_kernel=kernel)
    graph, weights = nnx.split(nnx.eval_shape(lambda: Decoder(ONE_LAYER, dtype=jnp.bfloat16)))
    leaves, tree = jax.tree.flatten(weights)
    state = jax.eval_shape(lambda: new_device_state(ONE_LAYER, config))
    buckets = buckets_for(config)
    assert {bucket.decode_only for bucket in buckets} == {True, False}
    for bucket in buckets:
        layout = BatchLayout(bucket, config.max_blocks_per_seq, 1)
        rules = RuleLayout(bucket.num_seqs, ONE_LAYER.vocab_size, config.max_model_len)
        program = lower_for(
            "h200",
            make_steps(make_forward(graph, tree, layout), make_choose(graph, tree, layout.choice)),
            leaves,
            state.kv_cache,
            state.last_token,
            jax.ShapeDtypeStruct((1, layout.size), jnp.int32),
            jax.eval_shape(rules.resident),
        )
        assert ("mosaic_gpu" in program) == (kernel == "mosaic_gpu"), bucket
        assert ("xla.gpu.triton" in program) == (kernel == "triton"), bucket


needs_tools = pytest.mark.skipif(
    not TOOLS.exists(), reason="compiling for GPUs needs what `make gpu-tools` installs"
)


@needs_tools
@pytest.mark.gpu_tools
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        *(("triton", kind) for kind in ("decode", "mixed")),
        *(("mosaic_gpu", kind) for kind in ("decode", "decodes", "mixed")),
    ],
)
def test_a_step_is_one_graph_that_writes_the_cache_in_place(kernel, kind, tmp_path):
    (step,) = run_with_tools(tmp_path, "step", kernel, kind)
    # 16 GiB for 32 layers. Besides, the last tokens are written where they were.
    assert step["aliased_bytes"] >= step["cache_bytes"] == step["num_layers"] << 29
    assert step["cache_copies"] == 0
    assert step["temporary_bytes"] < 256 << 20
    # The decodes, their merge, and in mixed steps the prompts.
    per_layer = 3 if kind == "mixed" else 2
    assert step["attention_kernels"] == step["num_layers"] * per_layer
    thunks = thunk_sequence(tmp_path)
    roots = roots_of(thunks)
    if kind == "decodes":
        # A loop whose body, with the choice of the tokens, is one graph.
        assert roots[-1] == "kWhile"
        assert re.search(
            r"^  body:\n +000: kCommandBuffer \[source \| sink\]", thunks, re.MULTILINE
        )
    elif kind == "mixed":
        # The log-probabilities of prompts, if somebody wants them, are not in the graph; behind
        # them the end of the packed buffer and the pending tokens are handed on.
        assert roots[:2] == ["kCommandBuffer", "kConditional"]
        assert roots[2:] in (["kCustomKernel"], ["kCopy", "kCustomKernel"])
    else:
        assert roots == ["kCommandBuffer"]


@needs_tools
@pytest.mark.gpu_tools
@pytest.mark.timeout(600)
def test_weights_of_eight_bits_are_multiplied_as_they_are(tmp_path):
    steps = run_with_tools(tmp_path, "step", "triton", "eight_bits")
    kinds = [(step["quantization"], step["use_library"]) for step in steps]
    assert kinds == [("int8", False), ("int8", True), ("fp8", False), ("fp8", True)]
    for step, (kind, use_library) in zip(steps, kinds, strict=True):
        products = step["products"]
        assert products.pop(f"{kind} by cuBLASLt" if use_library else kind) == 4
        # Nothing else is one, nothing makes other weights of them, and nothing is copied.
        assert not any(products.values())
        assert step["made_weights"] == ["parameter"]
        assert step["temporary_bytes"] < 64 << 20
        assert step["aliased_bytes"] >= step["cache_bytes"] == 1 << 29
        assert step["cache_copies"] == 0
    dumps = list(tmp_path.glob("*.thunk_sequence_after_thunk_passes.txt"))
    assert len(dumps) == 4
    for path in dumps:
        assert roots_of(path.read_text()) == ["kCommandBuffer"]


@needs_tools
@pytest.mark.gpu_tools
@pytest.mark.timeout(600)
def test_two_gpus_exchange_sums_between_graphs(tmp_path):
    step, choice = run_with_tools(tmp_path, "step", "triton", "decode", "2")
    check_shared_step(step, 2)
    # Two in each layer, and the embeddings.
    assert step["collectives"] == {"all-reduce": 2 * 2 + 1}
    # The logits; once more for those who want to know the model's own.
    assert choice["collectives"] == {"all-gather": 2}
    roots = roots_of(thunk_sequence(tmp_path))
    assert roots.count("kCommandBuffer") == 2 * 2


@needs_tools
@pytest.mark.gpu_tools
@pytest.mark.timeout(600)
def test_the_exchanges_can_be_in_the_graph(tmp_path):
    graphs = f"{LOOPS_IN_GRAPHS},+COLLECTIVES"
    (step,) = run_with_tools(tmp_path, "step", "mosaic_gpu", "decode", "4", graphs=graphs)
    check_shared_step(step, 4)
    # The sums of four have an order.
    assert step["collectives"] == {"all-to-all": 2 * 2, "all-gather": 2 * 2, "all-reduce": 1}
    assert roots_of(thunk_sequence(tmp_path)) == ["kCommandBuffer"]


def check_shared_step(step, num_gpus):
    """A decode step of two layers, of which each GPU has some of the heads."""
    assert step["aliased_bytes"] >= step["cache_bytes"] == (2 << 29) // num_gpus
    assert step["cache_copies"] == 0
    assert step["temporary_bytes"] < 256 << 20
    assert step["attention_kernels"] == 2 * 2


def thunk_sequence(folder):
    """What the host launches, as XLA tells it; parts of a graph are indented."""
    (path,) = folder.glob("*.thunk_sequence_after_thunk_passes.txt")
    return path.read_text()


def roots_of(thunks):
    return re.findall(r"^\d+: (\w+)", thunks, re.MULTILINE)
