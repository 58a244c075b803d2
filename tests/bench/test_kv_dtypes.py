import json

import numpy as np
import pytest
from click.testing import CliRunner

from bench.kv_dtypes import kv_dtypes, measure_dtypes
from compile_cache import use_compile_cache
from engine_builder import tiny_decoder
from golden_model import TINY_DIR

DTYPES = ("float32", "fp8_e5m2", "int8")
GOLDEN = np.load(TINY_DIR / "llama" / "golden.npz")


def test_capacity_is_that_of_the_stored_bytes():
    """Tiny heads are stored 64 wide: 2 * layers * heads * 64 elements, and scales of two bytes."""
    decoder, model = tiny_decoder("llama")
    vectors = 2 * model.num_layers * model.num_kv_heads
    window = GOLDEN["prompt_0"].tolist()
    reports = measure_dtypes(decoder, model, [window], dtypes=("bfloat16", *DTYPES[1:]))
    assert [report.bytes_per_token for report in reports] == [
        vectors * 128,
        vectors * 64,
        vectors * 66,
    ]
    assert [report.capacity for report in reports] == [1, 2, pytest.approx(128 / 66)]
    assert all(report.golden_kept is None and report.step_ms is None for report in reports)


def test_a_run_prints_a_table_and_writes_all_figures(tmp_path):
    use_compile_cache()
    golden, text, path = tmp_path / "golden.json", tmp_path / "text.md", tmp_path / "out.json"
    case = {"prompt_ids": GOLDEN["prompt_0"].tolist(), "output_ids": GOLDEN["greedy_0"].tolist()}
    golden.write_text(json.dumps({"cases": [case]}))
    text.write_text("How many tokens does it take? " * 5)
    result = CliRunner().invoke(
        kv_dtypes,
        [
            *("--model", str(TINY_DIR / "llama"), "--dtype", "float32", "--text", str(text)),
            *(word for dtype in DTYPES for word in ("--kv-cache-dtype", dtype)),
            *("--window", "64", "--max-windows", "2", "--golden", str(golden)),
            *("--step-repeats", "1", "--step-seqs", "8", "--output-json", str(path)),
        ],
    )
    assert result.exit_code == 0, result.output
    assert "llama, weights in float32" in result.output
    document = json.loads(path.read_text())
    assert document["schema"] == "headrace.bench.kv_dtypes/2"
    assert document["num_tokens"] == 128
    rows = {row["dtype"]: row for row in document["weights"]["float32"]}
    assert tuple(rows) == DTYPES
    assert rows["float32"]["loss"]["max_error"] == 0
    assert rows["float32"]["golden_kept"] == 1
    assert rows["float32"]["loss"]["agreement"] == 1
    assert rows["int8"]["loss"]["mean_error"] < rows["fp8_e5m2"]["loss"]["mean_error"]
    assert all(row["step_ms"][0] > 0 for row in rows.values())
