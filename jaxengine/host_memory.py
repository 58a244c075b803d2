"""How the C library treats memory that a step has freed.

XLA's CPU backend allocates the workspace of a program at every run and frees it after. By default
glibc gives such large pieces back to the system at once, so the next step gets new pages, each
with a fault and a page of zeros: 17,000 of them for a prompt step of 512 tokens.
"""

import ctypes

__all__ = ["keep_freed_memory"]

# Parameters of mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8

# Larger pieces, such as the KV cache, still come from the system one by one.
LARGEST_KEPT_BYTES = 1 << 30
MOST_KEPT_BYTES = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Have the C library keep freed memory for the next allocation of this process.

    Call it before threads are started. The process then holds what its largest step needed.

    Returns:
        Whether it does: False where the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    # Arenas of other threads cannot hold pieces beyond 64 MB, so there is one for all.
    wanted = (
        (M_ARENA_MAX, 1),
        (M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES),
        (M_TRIM_THRESHOLD, MOST_KEPT_BYTES),
    )
    return all(mallopt(parameter, value) == 1 for parameter, value in wanted)
