"""The C library's treatment of memory, seen by the page faults that it causes and by its pages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COUNT_FAULTS = """
import resource, sys, threading
import numpy as np
from jaxengine.host_memory import keep_freed_memory
if not keep_freed_memory():
    sys.exit("not glibc")
def count(result):
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        pieces = [np.ones(size << 18, np.float32) for size in (1, 40, 80)]  # MB
        del pieces
        result.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
faults = []
thread = threading.Thread(target=count, args=(faults,))
thread.start()
thread.join()
print(faults[-1])
"""


def count(script: str, **environment: str) -> int:
    """What a script prints; elsewhere than on glibc nothing is promised."""
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | environment
    )
    if "not glibc" in done.stderr:
        pytest.skip("the C library is not glibc")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_memory_that_is_used_again_costs_no_faults():
    assert count(COUNT_FAULTS) < 100  # 121 MB are 30,976 pages


# NumPy would ask for huge pages itself.
COUNT_HUGE_PAGES = """
import sys
import numpy as np
from jaxengine.host_memory import keep_freed_memory
if not keep_freed_memory():
    sys.exit("not glibc")
def huge_kilobytes():
    for line in open("/proc/self/smaps_rollup"):
        if line.startswith("AnonHugePages"):
            return int(line.split()[1])
before = huge_kilobytes()
pieces = [np.ones(size << 18, np.float32) for size in (1, 40, 80)]  # MB
print(huge_kilobytes() - before)
"""

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(),
    reason="the system gives no huge pages",
)
def test_memory_is_in_huge_pages():
    num_kilobytes = count(COUNT_HUGE_PAGES, NUMPY_MADVISE_HUGEPAGE="0")
    assert num_kilobytes > 60 << 10  # of 121 MB; memory in small pieces may have no more
