"""The C library's treatment of freed memory, seen by the page faults that it causes."""

import subprocess
import sys

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


def test_memory_that_is_used_again_costs_no_faults():
    command = [sys.executable, "-c", COUNT_FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "not glibc" in done.stderr:
        pytest.skip("the C library is not glibc")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100  # 121 MB are 30,976 pages
