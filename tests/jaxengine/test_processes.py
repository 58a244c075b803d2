import contextlib
import json
import socket
import subprocess
import sys

import numpy as np
import pytest

from jaxengine import processes
from jaxengine.processes import ProcessGroup, ProcessOptions, StepOrder

SCRIPT = """
import json, sys
import jax
import numpy as np
from jaxengine import processes
from jaxengine.processes import ProcessGroup, ProcessOptions, StepOrder

address, index = sys.argv[1], int(sys.argv[2])
group = ProcessGroup(
    ProcessOptions(coordinator_address=address, num_processes=2, process_id=index)
)
said = {"leads": group.leads, "devices": len(jax.devices())}
said["least"] = group.least((7 - index) << 20)
group.check_agreement("the same")
try:
    group.check_agreement(f"another in {index}")
except ValueError as error:
    said["error"] = str(error)
if group.leads:
    # More than the leader may be ahead.
    for number in range(200):
        group.tell(StepOrder(number, {"packed": np.arange(number % 7, dtype=np.int32)}))
    group.tell(StepOrder(None, {}))
    group.dismiss()
else:
    # The last that the leader may send before any is taken.
    group._wait_for(processes._order_key(1, processes.PAGE_ORDERS - 1))
    said["orders"] = [
        [order.bucket, {name: array.tolist() for name, array in order.arrays.items()}]
        for order in group.orders()
    ]
print(json.dumps(said))
"""


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def options(**changes):
    given = {"coordinator_address": "127.0.0.1:1", "num_processes": 2, "process_id": 0}
    return ProcessOptions(**{**given, **changes})


@pytest.fixture
def two_processes():
    """What each of two processes that run SCRIPT printed; none outlives the test."""
    address = free_address()
    with contextlib.ExitStack() as stack:
        running = []
        for index in range(2):
            process = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, address, str(index)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)  # before the context waits for its end
            running.append(process)
        said = []
        for process in running:
            output, errors = process.communicate()
            assert process.returncode == 0, errors[-2000:]
            said.append(json.loads(output.splitlines()[-1]))
        yield said


def test_the_second_process_does_what_the_first_says(two_processes):
    said = two_processes
    assert [one["leads"] for one in said] == [True, False]
    assert [one["devices"] for one in said] == [2, 2]
    assert [one["least"] for one in said] == [6 << 20, 6 << 20]
    for one in said:
        assert one["error"].endswith("process 1 has another configuration than process 0")
    assert said[1]["orders"] == [
        *([number, {"packed": list(range(number % 7))}] for number in range(200)),
        [None, {}],
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"coordinator_address": "host"}, "coordinator_address must be HOST:PORT, got 'host'"),
        ({"coordinator_address": ":80"}, "coordinator_address must be HOST:PORT, got ':80'"),
        ({"coordinator_address": "h:70000"}, "coordinator_address must be HOST:PORT"),
        ({"num_processes": 1}, "num_processes must be at least 2, got 1"),
        ({"process_id": 2}, "process_id must be from 0 to 1, got 2"),
        ({"process_id": -1}, "process_id must be from 0 to 1, got -1"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        options(**changes)


def test_a_taken_port_is_said_in_a_sentence():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"cannot listen on coordinator_address {address}: A"):
            ProcessGroup(options(coordinator_address=address))


def test_a_leader_that_never_listens_is_said_in_a_sentence(monkeypatch):
    monkeypatch.setattr(processes, "JOIN_TIMEOUT_S", 0)
    monkeypatch.setattr(processes, "ASK_INTERVAL_S", 0.01)
    address = free_address()
    with pytest.raises(ValueError, match=f"process 0 did not listen on .*{address} within 0 s"):
        ProcessGroup(options(coordinator_address=address, process_id=1))


def test_an_order_is_bytes_that_hold_no_code():
    order = StepOrder(3, {"packed": np.arange(4, dtype=np.int32)})
    assert b"pickle" not in order.encode()
    with pytest.raises(ValueError, match="pickle"):
        StepOrder(3, {"packed": np.array([object()])}).encode()
