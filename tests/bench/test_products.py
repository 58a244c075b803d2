import json

import pytest
from click.testing import CliRunner

from attention_kernels import can_project
from bench.products import products


def test_a_run_prints_all_sides_and_writes_all_figures(tmp_path):
    if not can_project():
        pytest.skip("no compiler here, or no instructions for bfloat16")
    path = tmp_path / "out.json"
    options = ["--max-tokens", "1", "--repeats", "2", "--output-json", str(path)]
    result = CliRunner().invoke(products, options)
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    assert document["schema"] == "headrace.bench.products/2"
    found = [(entry["matrix"], entry["tokens"]) for entry in document["products"]]
    assert found == [(name, 1) for name in ("qkv", "out", "gate and up", "down", "head")]
    for entry in document["products"]:
        for side in ("packed", "xla", "int8"):
            assert 0 < entry[side]["min_ms"] <= entry[side]["median_ms"]
    assert "gate and up" in result.output
