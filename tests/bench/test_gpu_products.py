import pytest

from bench import gpu_products
from bench.gpu import DRY
from bench.gpu_kernels import Ceilings


def test_each_kind_of_weights_is_measured_with_all_numbers_of_rows():
    ceilings = Ceilings(bytes_per_s=1e9, flop_per_s=1e12)
    rows = list(gpu_products.measure_products(DRY.products, ceilings))
    assert DRY.products.num_rows == (8, 16)
    assert [(row["weights"], row["rows"]) for row in rows] == [
        (kind, number) for kind in ("bfloat16", "int8", "fp8") for number in (8, 16)
    ]
    for row in rows:
        seconds = row["microseconds"] / 1e6
        # 64 by 32 weights, a product and a sum for each of them and each row.
        num_bytes = 64 * 32 * (2 if row["weights"] == "bfloat16" else 1)
        assert row["share_of_copy"] == pytest.approx(num_bytes / seconds / 1e9)
        assert row["teraflop_per_s"] == pytest.approx(2 * 64 * 32 * row["rows"] / seconds / 1e12)
        assert row["share_of_product"] == pytest.approx(row["teraflop_per_s"])
        # On a CPU no sum depends on the number of rows.
        assert row["same_bits"]


def test_rows_that_change_with_their_number_are_seen(monkeypatch):
    monkeypatch.setattr(gpu_products.fp8, "project", lambda x, w, s: x * len(x))
    rows = gpu_products.measure_products(DRY.products, Ceilings(1e9, 1e12))
    same = {(row["weights"], row["rows"]): row["same_bits"] for row in rows}
    assert not same.pop(("fp8", 8))
    assert all(same.values())
