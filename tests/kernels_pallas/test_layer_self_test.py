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


def change_results(monkeypatch, change, *, of):
    """Let calls for these halves return other numbers."""
    right = layer_self_test.run_layers

    def wrong(*arguments, halves="both", **options):
        out, *others = right(*arguments, halves=halves, **options)
        return change(out) if halves == of else out, *others

    monkeypatch.setattr(layer_self_test, "run_layers", wrong)


def test_numbers_that_are_wrong_for_one_token_are_found(monkeypatch):
    change_results(monkeypatch, lambda out: out.at[0, 5].add(0.5), of="mlp")
    found = find_layer_fault("int8", is_plain=False)
    assert found.startswith("int8 layer, mlp: wrong by 0.")


def test_layers_that_are_not_their_halves_are_found(monkeypatch):
    change_results(monkeypatch, lambda out: out.at[0, 5].add(1e-4), of="both")
    assert find_layer_fault("int8") == "int8 layer: other numbers than its halves"


@pytest.mark.parametrize("lost", ["_rotated", "_normalized"])
def test_a_part_that_is_left_out_is_found(lost, monkeypatch):
    monkeypatch.setattr(layer_self_test, lost, lambda x, *_: x)
    assert "wrong by" in find_layer_fault("int8", is_plain=False)


def test_a_window_that_is_not_kept_is_found(monkeypatch):
    right = layer_self_test.run_layers

    def wrong(*arguments, sliding_window, **options):
        return right(*arguments, sliding_window=None, **options)

    monkeypatch.setattr(layer_self_test, "run_layers", wrong)
    assert find_layer_fault("int8", sliding_window=9).startswith("int8 layer, attention: wrong")


def test_a_result_that_is_no_number_is_found(monkeypatch):
    change_results(monkeypatch, lambda out: out * np.nan, of="mlp")
    found = find_layer_fault("int8", is_plain=False)
    assert found == "int8 layer, mlp: something that is not finite"
