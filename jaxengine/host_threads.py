"""Who gets a core when the device is the host itself.

On the CPU the device's threads take all cores all the time, and the threads that answer clients
and schedule steps need one now and then, for a moment. With equal rights such a moment waits for
milliseconds, once for each token and each refusal.
"""

import contextlib
import os
import sys
import threading

import jax

__all__ = ["num_device_threads", "num_processors", "put_device_threads_behind"]

# Of the device's threads, 0 for all others. A runnable thread of nice 0 has nine times the weight.
DEVICE_NICE = 10

# Python's threads hand the interpreter over after 5 ms by default, the time of a small step.
SWITCH_INTERVAL_S = 0.0005


def num_processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_device_threads() -> int:
    """How many threads may run a program of XLA's CPU backend, or a part of one.

    It has two pools of equal size, one that begins programs and one that shares their work, and
    runs some programs in the thread that calls them. Their size can be set by NPROC.
    """
    wanted = os.environ.get("NPROC", "")
    size = int(wanted) if wanted.isdecimal() else num_processors()
    return 2 * max(size, jax.local_device_count()) + 1


def put_device_threads_behind() -> None:
    """Let the threads of XLA's CPU backend yield to all others of this process.

    Call it before anything has asked JAX for its devices: threads take on the niceness of the one
    that starts them. It does nothing about the niceness where the system has none for threads, and
    does not matter where the device is a GPU.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if not hasattr(os, "setpriority"):
        return
    starter = threading.Thread(target=_start_device_threads)
    starter.start()
    starter.join()


def _start_device_threads() -> None:
    own = threading.get_native_id()
    # A system may have no niceness for one thread alone.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + DEVICE_NICE)
    # Whoever needs devices next gets the error, if there is one.
    with contextlib.suppress(RuntimeError):
        jax.devices()
