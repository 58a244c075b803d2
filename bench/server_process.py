"""A `headrace serve` of our own on a free port, for as long as a block runs."""

import http.client
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

__all__ = ["ServerFailed", "ServerProcess", "find_headrace", "running_server"]

POLL_INTERVAL_S = 0.02
REQUEST_TIMEOUT_S = 5.0


class ServerFailed(Exception):
    """The server ended by itself, or was not ready in time."""


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server that answers.

    Attributes:
        url: without a trailing slash.
        listening_s, ready_s: seconds from the start of the process until it said which port it
            has, and until /ready answered 200. Resolution: POLL_INTERVAL_S.
    """

    url: str
    listening_s: float
    ready_s: float


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
            yield wait_until_ready(process, port_file, start_s, startup_timeout_s)
        except BaseException:
            process.kill()
            process.wait()
            raise
        stop(process)


def wait_until_ready(
    process: subprocess.Popen[bytes], port_file: Path, start_s: float, timeout_s: float
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
        port = read_port(port_file)
        if port is not None:
            listening_s = now_s if listening_s is None else listening_s
            if get_status(port, "/ready") == http.client.OK:
                return ServerProcess(
                    f"http://127.0.0.1:{port}", listening_s, time.perf_counter() - start_s
                )
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
