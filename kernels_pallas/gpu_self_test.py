"""Whether a GPU kernel gives right answers, in a process that may hang.

`python -m kernels_pallas.gpu_self_test KERNEL DTYPE BLOCK_SIZE HEAD_DIM [windows]` ends with 0, or
says what is wrong and ends with 1. `windows` also tests a sliding window and a soft cap.
"""

import os
import sys

from kernels_pallas.self_test import SOFT_CAP, WINDOW, find_fault

__all__: list[str] = []


def main(kernel: str, dtype: str, block_size: str, head_dim: str, windows: str = "") -> None:
    """Test a kernel as it would serve; the exit code is 1 if it has a fault."""
    # The server that asks has the GPU already, and most of its memory.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    for window, soft_cap in [(None, None), *([(WINDOW, SOFT_CAP)] if windows else [])]:
        fault = find_fault(
            dtype,  # type: ignore[arg-type]
            kernel=kernel,  # type: ignore[arg-type]
            block_size=int(block_size),
            head_dim=int(head_dim),
            sliding_window=window,
            soft_cap=soft_cap,
        )
        if fault is not None:
            sys.exit(f"error: {fault}")


if __name__ == "__main__":
    main(*sys.argv[1:])
