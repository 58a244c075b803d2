"""The self-test of the GPU kernels, with the kernel interpreted."""

import jax.numpy as jnp
import pytest

from kernels_pallas import triton
from kernels_pallas.gpu_self_test import main


def test_a_right_kernel_passes(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    main("triton", "bfloat16", "16", "64", "windows")


def test_wrong_windows_are_found(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    right = triton.ragged_paged_attention

    def blind(q, *arguments, sliding_window, **options):
        return right(q, *arguments, sliding_window=None, **options)

    monkeypatch.setattr(triton, "ragged_paged_attention", blind)
    main("triton", "bfloat16", "16", "64")
    with pytest.raises(SystemExit, match=r"error: bfloat16: wrong by \d"):
        main("triton", "bfloat16", "16", "64", "windows")


def test_a_wrong_one_ends_with_what_is_wrong(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)

    def zeros(q, *_, **__):
        return jnp.zeros_like(q)

    monkeypatch.setattr(triton, "ragged_paged_attention", zeros)
    with pytest.raises(SystemExit, match=r"error: int8: wrong by \d"):
        main("triton", "int8", "32", "64")
