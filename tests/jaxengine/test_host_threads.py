"""The niceness of threads, read back from the system in a process of its own."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have their own niceness")

COMPARE = """
import json, os, sys
from pathlib import Path
from jaxengine.host_threads import num_device_threads, put_device_threads_behind
own = os.getpriority(os.PRIO_PROCESS, 0)
put_device_threads_behind()
import jax, jax.numpy as jnp
(jnp.ones((512, 512)) @ jnp.ones((512, 512))).block_until_ready()
nice, runs = [], 0
for thread in Path("/proc/self/task").iterdir():
    name = (thread / "comm").read_text()
    if name.startswith("tf_XLA"):
        nice.append(os.getpriority(os.PRIO_PROCESS, int(thread.name)))
    runs += name.startswith(("tf_XLAEigen", "tf_XLAExecute"))
now = os.getpriority(os.PRIO_PROCESS, 0)
print(json.dumps([own, now, nice, sys.getswitchinterval(), runs, num_device_threads()]))
"""


def test_the_threads_of_the_device_yield_to_the_main_thread():
    command = [sys.executable, "-c", COMPARE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, after, of_device, switch_interval_s, runs, counted = json.loads(done.stdout)
    assert after == before
    assert of_device
    assert set(of_device) == {min(before + 10, 19)}
    assert switch_interval_s == 0.0005
    # Those that may run a program, and whoever calls it.
    assert counted == runs + 1
