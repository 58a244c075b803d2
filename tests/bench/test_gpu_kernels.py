from dataclasses import replace

import pytest

from bench.gpu import DRY
from bench.gpu_kernels import measure_ceilings, measure_kernels
from kernels_pallas.tuning import mosaic_candidates, triton_candidates


@pytest.fixture(scope="module")
def ceilings():
    return measure_ceilings(DRY.sizes)


def test_an_entry_is_measured_against_the_ceilings_and_a_failing_one_is_named(
    ceilings, monkeypatch
):
    assert ceilings.bytes_per_s > 0
    assert ceilings.flop_per_s > 0
    real = triton_candidates("decode", 64)[1]

    def candidates(phase, head_dim):
        return (real, "no sizes") if phase == "decode" else ()

    monkeypatch.setattr("bench.gpu_kernels.triton_candidates", candidates)
    measured, failed = measure_kernels("triton", "bfloat16", DRY.sizes, ceilings)
    assert failed["config"] == "'no sizes'"
    assert "'str' object has no attribute" in failed["error"]
    assert measured["config"] == repr(real)
    # 20 tokens lie in 2 blocks of 16: K and V of 2 heads of 64 in 2 bytes.
    num_bytes = 2 * 16 * 2 * 2 * 64 * 2
    seconds = measured["microseconds"] / 1e6
    assert measured["gigabytes_per_s"] == pytest.approx(num_bytes / seconds / 1e9)
    assert measured["share_of_copy"] == pytest.approx(num_bytes / seconds / ceilings.bytes_per_s)
    # Each of 4 heads of 64 meets 20 tokens, once with K and once with V: a product and a sum.
    assert measured["teraflop_per_s"] == pytest.approx(4 * 20 * 64 * 4 / seconds / 1e12)


@pytest.mark.parametrize(
    ("kernel", "candidates", "head_dims"),
    [("triton", triton_candidates, (64, 128, 256)), ("mosaic_gpu", mosaic_candidates, (64, 128))],
)
def test_every_entry_of_the_table_is_measured_where_the_kernel_has_such_heads(
    kernel, candidates, head_dims, ceilings, monkeypatch
):
    monkeypatch.setattr("bench.gpu_kernels._compile", lambda case: case)
    monkeypatch.setattr("bench.gpu_kernels._measure", lambda case, attend, repeats: (1.0, 1, 1))
    sizes = replace(DRY.sizes, head_dims=(128, 64, 256), decodes=((1, 64), (8, 64)))
    rows = list(measure_kernels(kernel, "bfloat16", sizes, ceilings))
    expected = {
        (phase, head_dim, repr(config))
        for phase in ("decode", "prefill")
        for head_dim in head_dims
        for config in candidates(phase, head_dim)
    }
    assert {(row["phase"], row["head_dim"], row["config"]) for row in rows} == expected
    # The first head dim at both sizes of decodes.
    num_twice = len(candidates("decode", 128))
    assert len(rows) == len(expected) + num_twice
    # Of other dtypes, what is in use.
    others = list(measure_kernels(kernel, "float16", sizes, ceilings))
    assert [row["config"] for row in others] == [
        *[repr(candidates("decode", 128)[0])] * 2,
        repr(candidates("prefill", 128)[0]),
    ]
