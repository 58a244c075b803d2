from dataclasses import replace

import pytest

from kernels_pallas import gpu_choice
from kernels_pallas.gpu_choice import GpuUse, find_gpu_fault
from kernels_pallas.native_build import BuildError

H200 = GpuUse(device="NVIDIA H200")


@pytest.fixture(autouse=True)
def tests(monkeypatch):
    """Commands of the self-tests that were run; all pass."""
    commands: list[list[str]] = []

    def run(command, *, timeout_s):
        commands.append(command[1:])
        return ""

    monkeypatch.setattr(gpu_choice, "run_limited", run)
    return commands


@pytest.mark.parametrize(
    ("kernel", "changes", "fault"),
    [
        ("mosaic_gpu", {}, None),
        ("mosaic_gpu", {"device": "NVIDIA H100 80GB HBM3"}, None),
        ("mosaic_gpu", {"device": "NVIDIA GH200 480GB"}, None),
        (
            "mosaic_gpu",
            {"device": "NVIDIA A100-SXM4-80GB"},
            "it is for Hopper, not for NVIDIA A100",
        ),
        ("mosaic_gpu", {"kv_cache_dtype": "int8"}, "it has no KV cache of int8"),
        ("mosaic_gpu", {"head_dim": 256}, "it has heads of up to 128, not of 256"),
        ("triton", {"device": "NVIDIA L4", "kv_cache_dtype": "fp8_e4m3", "head_dim": 256}, None),
        ("triton", {"device": "AMD MI300X"}, "it is for NVIDIA GPUs, not for AMD MI300X"),
    ],
)
def test_what_a_kernel_is_for(kernel, changes, fault):
    found = find_gpu_fault(kernel, replace(H200, **changes), block_size=16, may_run=True)
    assert found is None if fault is None else found.startswith(fault)


def test_other_block_sizes_are_a_fault():
    fault = find_gpu_fault("triton", H200, block_size=24, may_run=False)
    assert fault == "it has block sizes of 8, 16, 32, 64, 128, not 24"


def test_the_kernel_is_tested_as_it_would_serve(tests):
    use = replace(H200, kv_cache_dtype="float16", head_dim=64)
    assert find_gpu_fault("mosaic_gpu", use, block_size=32, may_run=True) is None
    assert tests == [["-m", "kernels_pallas.gpu_self_test", "mosaic_gpu", "float16", "32", "64"]]


def test_windows_and_soft_caps_are_tested_where_a_model_has_them(tests):
    use = replace(H200, is_plain=False)
    assert find_gpu_fault("mosaic_gpu", use, block_size=16, may_run=True) is None
    assert tests[0][2:] == ["mosaic_gpu", "bfloat16", "16", "128", "windows"]


def test_nothing_is_run_where_that_is_not_wanted(tests):
    assert find_gpu_fault("triton", H200, block_size=16, may_run=False) is None
    assert tests == []


def test_a_test_that_hangs_or_fails_is_a_fault(monkeypatch):
    def hang(command, *, timeout_s):
        raise BuildError("python did not end within 120 s", lasting=False)

    monkeypatch.setattr(gpu_choice, "run_limited", hang)
    fault = find_gpu_fault("mosaic_gpu", H200, block_size=16, may_run=True)
    assert fault == "python did not end within 120 s"
