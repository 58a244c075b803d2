import pytest

from bench.gpu import DRY
from bench.gpu_kernels import measure_ceilings, rank_kernels
from kernels_pallas.tuning import triton_candidates


def test_every_entry_of_the_table_is_measured_and_a_failing_one_is_named(monkeypatch):
    ceilings = measure_ceilings(DRY.sizes)
    assert ceilings.bytes_per_s > 0
    assert ceilings.flop_per_s > 0
    real = triton_candidates("decode", 64)[1]

    def candidates(phase, head_dim):
        return (real, "no sizes") if phase == "decode" else ()

    monkeypatch.setattr("bench.gpu_kernels.triton_candidates", candidates)
    monkeypatch.setattr("bench.gpu_kernels.asdict", str)
    measured, failed = rank_kernels("triton", "bfloat16", DRY.sizes, ceilings)
    assert "'str' object has no attribute" in failed["error"]
    # 20 tokens lie in 2 blocks of 16: K and V of 2 heads of 64 in 2 bytes.
    num_bytes = 2 * 16 * 2 * 2 * 64 * 2
    seconds = measured["microseconds"] / 1e6
    assert measured["gigabytes_per_s"] == pytest.approx(num_bytes / seconds / 1e9)
    assert measured["share_of_copy"] == pytest.approx(num_bytes / seconds / ceilings.bytes_per_s)
