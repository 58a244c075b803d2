"""The halves of a layer against NumPy, with all that models differ in."""

import pytest

from attention_kernels import can_project, ready_kernel
from kernels_pallas.choice import KernelUnavailable
from kernels_pallas.layer_self_test import find_layer_fault


@pytest.fixture(params=["bfloat16", "int8"])
def weight_dtype(request):
    try:
        ready_kernel("native")
    except KernelUnavailable as error:
        pytest.skip(str(error))
    if request.param == "bfloat16" and not can_project():
        pytest.skip("no instructions for bfloat16")
    return request.param


@pytest.mark.parametrize("is_plain", [True, False])
def test_both_halves_are_those_of_numpy(is_plain, weight_dtype):
    assert find_layer_fault(weight_dtype, is_plain=is_plain) is None


def test_a_window_and_a_soft_cap_reach_attention(weight_dtype):
    assert find_layer_fault(weight_dtype, sliding_window=9, soft_cap=2.0) is None
