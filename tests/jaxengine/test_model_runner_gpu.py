"""A whole step of a model of 8 billion weights, compiled for an H200 that is not there."""

import re

import pytest

from compile_for_gpu import TOOLS, run_with_tools


@pytest.mark.skipif(
    not TOOLS.exists(), reason="compiling for GPUs needs what `make gpu-tools` installs"
)
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
    (path,) = tmp_path.glob("*.thunk_sequence_after_thunk_passes.txt")
    roots = re.findall(r"^\d+: (\w+)", path.read_text(), re.MULTILINE)
    # Only the log-probabilities of prompts, if somebody wants them, are not in the graph.
    assert roots == ["kCommandBuffer"] + (["kConditional"] if kind == "mixed" else [])
