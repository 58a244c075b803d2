"""Every entry of the tuning table, compiled to machine code for GPUs that are not there."""

import re

import pytest

from compile_for_gpu import TOOLS, run_with_tools
from kernels_pallas.tuning import (
    mosaic_candidates,
    mosaic_config,
    triton_candidates,
    triton_config,
)
from kernels_pallas.work_plan import SPLIT_MULTIPLE

CANDIDATES = [
    (triton_candidates, triton_config, (64, 128, 256)),
    (mosaic_candidates, mosaic_config, (64, 128)),
]

needs_tools = pytest.mark.skipif(
    not TOOLS.exists(), reason="compiling for GPUs needs what `make gpu-tools` installs"
)


@pytest.mark.parametrize(("candidates", "in_use", "head_dims"), CANDIDATES)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_what_is_in_use_is_a_candidate_and_its_tile_crosses_no_split(
    candidates, in_use, head_dims, phase
):
    for head_dim in head_dims:
        entries = candidates(phase, head_dim)
        assert entries[0] == in_use(phase, head_dim)
        assert len(set(entries)) == len(entries)
        assert all(SPLIT_MULTIPLE % entry.tile == 0 for entry in entries)


@needs_tools
@pytest.mark.gpu_tools
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("gpu", "kernel"),
    [("h200", "triton"), ("a100", "triton"), ("l4", "triton"), ("h200", "mosaic_gpu")],
)
def test_every_entry_compiles_without_spills(gpu, kernel, tmp_path):
    compiled = run_with_tools(tmp_path, "kernels", kernel, gpu)
    head_dims = (64, 128, 256) if kernel == "triton" else (64, 128)
    assert len(compiled) >= 2 * len(head_dims)
    # Spills of the Triton backend fail its compilation. The other one tells.
    if kernel == "mosaic_gpu":
        reports = [path.read_text() for path in tmp_path.glob("*.ptxas")]
        spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", "".join(reports))
        assert len(reports) >= 2 * len(head_dims)
        assert set(spilled) == {"0"}
