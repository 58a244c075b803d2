import json

import pytest
from click.testing import CliRunner

from attention_kernels import ready_kernel
from bench.attention_kernels import attention_kernels
from kernels_pallas.choice import KernelUnavailable


@pytest.fixture(autouse=True)
def native():
    try:
        ready_kernel("native")
    except KernelUnavailable as error:
        pytest.skip(str(error))


def test_a_run_prints_both_kernels_side_by_side_and_writes_all_figures(tmp_path):
    path = tmp_path / "out.json"
    options = ["--max-context", "0", "--repeats", "2", "--output-json", str(path)]
    result = CliRunner().invoke(attention_kernels, options)
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    assert document["schema"] == "headrace.bench.attention_kernels/1"
    # Chunks of 64 and of 512 queries without context.
    assert [(case["num_queries"], case["context"]) for case in document["cases"]] == [
        (64, 0),
        (512, 0),
    ]
    for case in document["cases"]:
        assert [timing["kernel"] for timing in case["timings"]] == ["native", "reference"]
        for timing in case["timings"]:
            assert 0 < timing["min_ms"] <= timing["median_ms"]
    assert "native" in result.output
