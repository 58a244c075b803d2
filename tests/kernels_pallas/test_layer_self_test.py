"""The self-test of layers finds what is wrong, whatever it is."""

import numpy as np
import pytest

from attention_kernels import ready_kernel
from kernels_pallas import layer_self_test
from kernels_pallas.choice import KernelUnavailable
from kernels_pallas.layer_self_test import find_layer_fault


@pytest.fixture(autouse=True)
def ready():
    try:
        ready_kernel("native")
    except KernelUnavailable as error:
        pytest.skip(str(error))


def test_numbers_that_are_wrong_for_one_token_are_found(monkeypatch):
    right = layer_self_test.run_mlp_half

    def wrong(x, *arguments, **options):
        return right(x, *arguments, **options).at[0, 5].add(0.5)

    monkeypatch.setattr(layer_self_test, "run_mlp_half", wrong)
    assert find_layer_fault("int8").startswith("int8 layer, mlp: wrong by 0.")


@pytest.mark.parametrize("lost", ["_rotated", "_normalized"])
def test_a_part_that_is_left_out_is_found(lost, monkeypatch):
    monkeypatch.setattr(layer_self_test, lost, lambda x, *_: x)
    assert "wrong by" in find_layer_fault("int8", is_plain=False)


def test_a_window_that_is_not_kept_is_found(monkeypatch):
    right = layer_self_test.run_attention_half

    def wrong(*arguments, sliding_window, **options):
        return right(*arguments, sliding_window=None, **options)

    monkeypatch.setattr(layer_self_test, "run_attention_half", wrong)
    assert find_layer_fault("int8", sliding_window=9).startswith("int8 layer, attention: wrong")


def test_a_result_that_is_no_number_is_found(monkeypatch):
    right = layer_self_test.run_mlp_half

    def wrong(x, *arguments, **options):
        return right(x, *arguments, **options) * np.nan

    monkeypatch.setattr(layer_self_test, "run_mlp_half", wrong)
    assert find_layer_fault("int8") == "int8 layer, mlp: something that is not finite"
