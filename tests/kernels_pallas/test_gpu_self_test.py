"""The self-test of the GPU kernels, with the kernel interpreted."""

import jax.numpy as jnp
import pytest

from kernels_pallas import gpu_self_test, triton
from kernels_pallas.gpu_self_test import main


def test_a_right_kernel_passes(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    main("triton", "bfloat16", "16", "64", "windows")


def test_wrong_windows_are_found(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)

    def find_fault(dtype, *, sliding_window, soft_cap, **_):
        return "wrong" if sliding_window and soft_cap else None

    monkeypatch.setattr(gpu_self_test, "find_fault", find_fault)
    main("triton", "bfloat16", "16", "64")
    with pytest.raises(SystemExit, match="error: wrong"):
        main("triton", "bfloat16", "16", "64", "windows")


def test_a_wrong_one_ends_with_what_is_wrong(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)

    def zeros(q, *_, **__):
        return jnp.zeros_like(q)

    monkeypatch.setattr(triton, "ragged_paged_attention", zeros)
    with pytest.raises(SystemExit, match=r"error: int8: wrong by \d"):
        main("triton", "int8", "32", "64")
