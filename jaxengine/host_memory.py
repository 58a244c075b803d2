"""How the C library treats the memory of steps: what was freed is kept, and in huge pages.

XLA's CPU backend allocates the workspace of a program at every run and frees it after. By default
glibc gives such large pieces back to the system at once, so the next step gets new pages, each
with a fault and a page of zeros: 17,000 of them for a prompt step of 512 tokens. And a step that
decodes reads the keys and values of every sequence, a few kilobytes here and there: most of these
are in pages of 4 KiB whose addresses the processor has to look up anew.
"""

import ctypes
import mmap
import os

__all__ = ["keep_freed_memory"]

# Parameters of mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
NEVER = -1

PIECE_BYTES = 1 << 30
HUGE_PAGE_BYTES = 1 << 21


def keep_freed_memory() -> bool:
    """Have the C library keep freed memory for the next allocation of this process.

    Call it before threads are started. The process then holds what its largest step needed. Where
    the system gives huge pages to those that ask for them, memory comes in such.

    Returns:
        Whether it does: False where the C library is not glibc.
    """
    try:
        library = ctypes.CDLL(None)
        mallopt = library.mallopt
    except (AttributeError, OSError):
        return False
    # Arenas of other threads cannot hold pieces beyond 64 MB, so there is one for all; and what is
    # mapped by itself goes back to the system by itself, so nothing is.
    wanted = ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER))
    if not all(mallopt(parameter, value) == 1 for parameter, value in wanted):
        return False
    _ask_for_huge_pages(library)
    return True


def _ask_for_huge_pages(library: ctypes.CDLL) -> None:
    """Do so for all memory that the machine has.

    No setting of a running process does. But the wish belongs to addresses, and those of pieces
    that are freed untouched are the next to be allocated.
    """
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    pieces = [library.malloc(PIECE_BYTES) for _ in range(machine_bytes // PIECE_BYTES)]
    for piece in filter(None, pieces):
        begin = -(-piece // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        library.madvise(begin, piece + PIECE_BYTES - begin, mmap.MADV_HUGEPAGE)
    for piece in pieces:
        library.free(piece)
