"""The self-test: a right kernel passes, wrong numbers do not."""

import subprocess
import sys
from itertools import count

import jax.numpy as jnp
import pytest

from attention_kernels import ready_kernel
from attention_scene import KV_CACHE_DTYPES
from kernels_pallas import native, self_test
from kernels_pallas.choice import KernelUnavailable
from kernels_pallas.native_build import WRONG_ANSWER
from kernels_pallas.self_test import find_fault


@pytest.fixture(autouse=True)
def ready():
    try:
        ready_kernel("native")
    except KernelUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_a_right_kernel_has_no_fault(dtype):
    assert find_fault(dtype) is None


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_wrong_numbers_are_found(dtype, monkeypatch):
    right = native.ragged_paged_attention

    def wrong(q, cache, batch, **options):
        return right(q, cache, batch, **options).at[3, 1, 2].add(0.1)

    monkeypatch.setattr(native, "ragged_paged_attention", wrong)
    assert find_fault(dtype) == f"{dtype}: wrong by 0.1"


def test_a_result_that_is_no_number_is_found(monkeypatch):
    def nonsense(q, cache, batch, **options):
        return jnp.full(q.shape, jnp.nan)

    monkeypatch.setattr(native, "ragged_paged_attention", nonsense)
    assert find_fault("bfloat16") == "bfloat16: something that is not finite"


def test_a_key_that_was_not_written_is_found(monkeypatch):
    monkeypatch.setattr(native, "write_kv", lambda cache, k, v, slots, *, first_block: cache)
    assert find_fault("float32") is not None


def test_a_wrong_answer_has_an_exit_code_of_its_own(monkeypatch, capsys):
    """Python ends with 1 for whatever it raises, also where there is no memory for the test."""
    monkeypatch.setattr(native, "load", lambda _: native.NativeLibrary("AVX2", print, count()))
    monkeypatch.setattr(
        self_test, "find_fault", lambda dtype, **_: "wrong by 3" if dtype == "int8" else None
    )
    with pytest.raises(SystemExit) as caught:
        self_test.main("library")
    assert caught.value.code == WRONG_ANSWER
    assert WRONG_ANSWER not in (0, 1, 2)
    assert capsys.readouterr().err == "error: wrong by 3\n"


def test_a_file_that_is_no_library_ends_the_program(tmp_path):
    library = tmp_path / "attention.so"
    library.write_text("not a library")
    command = [sys.executable, "-m", "kernels_pallas.self_test", str(library)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert answer.returncode == 1
    assert "OSError" in answer.stderr
