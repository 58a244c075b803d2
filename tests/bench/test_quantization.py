import json
from dataclasses import replace

import numpy as np
from click.testing import CliRunner

from bench import quantization
from compile_cache import use_compile_cache
from golden_model import TINY_DIR

GOLDEN = np.load(TINY_DIR / "llama" / "golden.npz")


def test_a_run_prints_a_table_and_writes_all_figures(tmp_path, monkeypatch):
    use_compile_cache()
    # Not each kind with each dtype: each takes a program.
    kinds = quantization.KINDS
    head_too = replace(kinds[4], dtype="float32")
    monkeypatch.setattr(quantization, "KINDS", (*kinds[:3], head_too, kinds[5]))
    golden, text, path = tmp_path / "golden.json", tmp_path / "text.md", tmp_path / "out.json"
    case = {"prompt_ids": GOLDEN["prompt_0"].tolist(), "output_ids": GOLDEN["greedy_0"].tolist()}
    golden.write_text(json.dumps({"cases": [case]}))
    text.write_text("How many tokens does it take? " * 5)
    result = CliRunner().invoke(
        quantization.quantization,
        [
            *("--model", str(TINY_DIR / "llama"), "--text", str(text), "--golden", str(golden)),
            *("--window", "64", "--max-windows", "2", "--output-json", str(path)),
        ],
    )
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    assert document["schema"] == "headrace.bench.quantization/1"
    assert document["num_tokens"] == 128
    rows = {(row["name"], row["dtype"]): row for row in document["weights"]}
    exact, half = rows["float32", "float32"], rows["bfloat16", "bfloat16"]
    eight, most = rows["int8", "float32"], rows["int8, head in float32", "float32"]
    floats = rows["fp8", "float32"]
    assert exact["loss"]["max_error"] == 0
    assert exact["golden_kept"] == 1
    # Logits reach 16; the head is one of thirteen products.
    for worse in (half, eight, most):
        assert 0 < worse["loss"]["mean_error"] < 0.3
    assert most["loss"]["mean_error"] < eight["loss"]["mean_error"]
    assert most["num_bytes"] < eight["num_bytes"] < exact["num_bytes"]
    # Three bits of mantissa; the head is as it is.
    assert most["loss"]["mean_error"] < floats["loss"]["mean_error"] < 1
    assert floats["num_bytes"] == most["num_bytes"]
