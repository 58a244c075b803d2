"""A server on a free port of ours, for as long as a block runs: `headrace serve` or another."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

__all__ = [
    "PORT",
    "ServerFailed",
    "ServerProcess",
    "find_headrace",
    "running_peer",
    "running_server",
    "stop_group",
]

POLL_INTERVAL_S = 0.02
REQUEST_TIMEOUT_S = 5.0
PEER_STOP_S = 20.0
PORT = "{port}"  # in the command line of a server that must be told its port


class ServerFailed(Exception):
    """The server ended by itself, or was not ready in time."""


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server that answers.

    Attributes:
        url: without a trailing slash.
        listening_s, ready_s: seconds from the start of the process until it said which port it
            has, and until it said that it is ready. Resolution: POLL_INTERVAL_S.
        pid: of the process that was started.
    """

    url: str
    listening_s: float
    ready_s: float
    pid: int


def find_headrace() -> str:
    """The `headrace` command of this environment.

    Raises:
        ServerFailed: it is not installed.
    """
    command = Path(sysconfig.get_path("scripts")) / "headrace"
    if not command.exists():
        raise ServerFailed(
            f"there is no headrace command beside {sys.executable}; install headrace"
        )
    return str(command)


@contextmanager
def running_server(
    command: Sequence[str],
    *,
    startup_timeout_s: float,
    output: IO[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[ServerProcess]:
    """Start a server, wait until it is ready, and stop it at the end, whatever happens in between.

    Args:
        command: the command line, without --port; `[find_headrace(), "serve"]` for ours.
        startup_timeout_s: after which a server that is not ready has failed.
        output: where its output goes; None sends it to our stderr.
        environment: variables that it gets besides ours.

    Raises:
        ServerFailed: it ended by itself, was not ready in time, or did not stop when asked.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        port_file = Path(folder) / "port"
        start_s = time.perf_counter()
        process = subprocess.Popen(
            [*command, "--port", "0", "--port-file", str(port_file)],
            stdout=output or sys.stderr,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
        try:
            find_port = partial(read_port, port_file)
            yield wait_until_ready(process, find_port, "/ready", start_s, startup_timeout_s)
        except BaseException:
            process.kill()
            process.wait()
            raise
        stop(process)


@contextmanager
def running_peer(
    command: Sequence[str],
    *,
    ready_path: str,
    startup_timeout_s: float,
    output: IO[str],
    environment: Mapping[str, str] | None = None,
) -> Iterator[ServerProcess]:
    """Someone else's server: it is told a free port, and may end as it likes when asked to.

    Args:
        command: the command line; PORT in it is replaced.
        ready_path: answers 200 when it is ready.
        startup_timeout_s: after which a server that is not ready has failed.
        output: where its output goes.
        environment: variables that it gets besides ours.

    Raises:
        ServerFailed: it cannot be started, ended by itself or was not ready in time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_s = time.perf_counter()
    try:
        process = subprocess.Popen(
            [word.replace(PORT, str(port)) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # so that its children can be ended with it
        )
    except OSError as error:
        raise ServerFailed(f"it cannot be started: {error}") from error
    try:
        yield wait_until_ready(process, lambda: port, ready_path, start_s, startup_timeout_s)
    finally:
        stop_group(process)


def stop_group(process: subprocess.Popen[Any], timeout_s: float = PEER_STOP_S) -> None:
    """Ask the leader of a session to end, then end whatever is left of it."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until_ready(
    process: subprocess.Popen[bytes],
    find_port: Callable[[], int | None],
    ready_path: str,
    start_s: float,
    timeout_s: float,
) -> ServerProcess:
    """Poll from outside, as any supervisor of a process has to."""
    listening_s: float | None = None
    while True:
        if (code := process.poll()) is not None:
            raise ServerFailed(f"the server ended before it was ready, with exit code {code}")
        now_s = time.perf_counter() - start_s
        if now_s > timeout_s:
            raise ServerFailed(f"the server was not ready within {timeout_s:g} s")
        # Read anew each time: a file that is half written gives a wrong port once, not for ever.
        port = find_port()
        if port is not None:
            listening_s = now_s if listening_s is None else listening_s
            if get_status(port, ready_path) == http.client.OK:
                ready_s = time.perf_counter() - start_s
                url = f"http://127.0.0.1:{port}"
                return ServerProcess(url, listening_s, ready_s, process.pid)
        time.sleep(POLL_INTERVAL_S)


def read_port(port_file: Path) -> int | None:
    """The port in the file; None as long as there is none."""
    try:
        text = port_file.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isdecimal() else None


def get_status(port: int, path: str) -> int | None:
    """The status that a GET is answered with; None if it is not answered."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def stop(process: subprocess.Popen[bytes], timeout_s: float = 60.0) -> None:
    """Ask a server to end, as a supervisor does.

    Raises:
        ServerFailed: it took too long, and was killed, or ended with an error.
    """
    process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise ServerFailed(f"the server did not stop within {timeout_s:g} s") from None
    if code not in (os.EX_OK, -signal.SIGTERM):
        raise ServerFailed(f"the server stopped with exit code {code}")
