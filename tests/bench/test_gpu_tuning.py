import math

import pytest

from bench.gpu_tuning import rank_configs
from kernels_pallas.tuning import TritonConfig


def row(config, microseconds, *, phase="decode", sequences=1, dtype="bfloat16"):
    result = {
        "kernel": "triton",
        "kv_cache_dtype": dtype,
        "phase": phase,
        "head_dim": 128,
        "sequences": sequences,
        "context": 1024,
        "config": config,
    }
    return result | ({"error": "x"} if microseconds is None else {"microseconds": microseconds})


def test_short_and_long_batches_count_alike():
    # One is twice as slow on the short batch, the other a tenth slower on the long one.
    rows = [row("a", 2.0), row("b", 1.0), row("a", 1000.0, sequences=8)]
    rows.append(row("b", 1100.0, sequences=8))
    (ranked,) = rank_configs(rows)
    assert [entry["config"] for entry in ranked["ranked"]] == ["b", "a"]
    assert [entry["ratio"] for entry in ranked["ranked"]] == [
        pytest.approx(math.sqrt(1.1)),
        pytest.approx(math.sqrt(2.0)),
    ]


def test_what_failed_or_was_cut_off_comes_last():
    rows = [row("failed", None), row("cut", 1.0), row("slow", 9.0), row("slow", 9.0, sequences=8)]
    (ranked,) = rank_configs(rows)
    assert [(e["config"], e["ratio"]) for e in ranked["ranked"]] == [
        ("slow", pytest.approx(3.0)),  # nine times the fastest there, and the fastest
        ("failed", None),
        ("cut", None),
    ]


def test_each_key_of_the_table_gets_its_entry_and_other_dtypes_do_not_count():
    configs = [TritonConfig(rows=16, tile=t, num_warps=4, num_stages=3) for t in (32, 64)]
    rows = [row(repr(config), 10.0 - index) for index, config in enumerate(configs)]
    rows.append(row(repr(configs[0]), 5.0, phase="prefill"))
    rows.append(row(repr(configs[0]), 1.0, dtype="int8"))
    decode, prefill = rank_configs(rows)
    assert (decode["phase"], prefill["phase"]) == ("decode", "prefill")
    table = eval(f"{{{decode['entry']}{prefill['entry']}}}", {"TritonConfig": TritonConfig})
    assert table == {
        ("decode", 128): (configs[1], configs[0]),
        ("prefill", 128): (configs[0],),
    }
    assert "# 1.11" in decode["entry"]
