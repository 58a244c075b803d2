import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest

from bench import server_process
from bench.server_process import (
    PORT,
    ServerFailed,
    find_headrace,
    running_peer,
    running_server,
    stop_group,
)

# A server as `headrace serve` behaves from outside: --port 0, --port-file, /ready, SIGTERM.
SERVER = """
import http.server, os, pathlib, signal, sys

class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        self.send_response(200 if Handler.asked > {not_ready} else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *arguments):
        print("asked", flush=True)

assert sys.argv[1:3] == ["--port", "0"] and sys.argv[3] == "--port-file"
signal.signal(signal.SIGTERM, lambda *_: os._exit({exit_code}))
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
path = pathlib.Path(sys.argv[4])
path.write_text("")  # as a file looks that is just being written
path.write_text(str(server.server_port) + "\\n")
server.serve_forever()
"""


def command(not_ready: int = 0, exit_code: int = 0) -> list[str]:
    return [sys.executable, "-c", SERVER.format(not_ready=not_ready, exit_code=exit_code)]


def test_a_server_runs_for_as_long_as_the_block():
    with tempfile.TemporaryFile("w+") as output:
        with running_server(command(not_ready=3), startup_timeout_s=60, output=output) as server:
            with urllib.request.urlopen(f"{server.url}/ready") as answer:
                assert answer.status == 200
            assert 0 < server.listening_s <= server.ready_s
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(f"{server.url}/ready")
        output.seek(0)
        assert output.read().count("asked") == 5  # three times too early, once ready, once here


def test_a_server_gets_further_variables():
    script = "import os; exit(int(os.environ['CODE']))"
    with (
        tempfile.TemporaryFile("w+") as output,
        pytest.raises(ServerFailed, match="exit code 5"),
        running_server(
            [sys.executable, "-c", script],
            startup_timeout_s=60,
            output=output,
            environment={"CODE": "5"},
        ),
    ):
        pass


def test_a_server_that_ends_by_itself_has_failed():
    with (
        tempfile.TemporaryFile("w+") as output,
        pytest.raises(ServerFailed, match="ended before it was ready, with exit code 3"),
        running_server([sys.executable, "-c", "exit(3)"], startup_timeout_s=60, output=output),
    ):
        pass


def test_a_server_that_is_never_ready_has_failed():
    with (
        tempfile.TemporaryFile("w+") as output,
        pytest.raises(ServerFailed, match=r"not ready within 0\.5 s"),
        running_server(command(not_ready=10**9), startup_timeout_s=0.5, output=output),
    ):
        pass


def test_a_server_that_stops_with_an_error_has_failed():
    with (
        tempfile.TemporaryFile("w+") as output,
        pytest.raises(ServerFailed, match="stopped with exit code 4"),
        running_server(command(exit_code=4), startup_timeout_s=60, output=output),
    ):
        pass


def test_an_error_in_the_block_ends_the_server_and_is_the_one_that_is_raised():
    with tempfile.TemporaryFile("w+") as output:
        with (
            pytest.raises(KeyError),
            running_server(command(), startup_timeout_s=60, output=output) as server,
        ):
            raise KeyError("mine")
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(server.url)


def test_the_installed_command_is_the_one_of_this_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server_process.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(ServerFailed, match="no headrace command"):
        find_headrace()
    (tmp_path / "headrace").touch()
    assert find_headrace() == str(tmp_path / "headrace")


# Another's server: it is told its port, ignores SIGTERM if need be, and has a child.
PEER = """
import http.server, os, signal, subprocess, sys

CHILD = "import sys, time; held = open(sys.argv[1], 'w'); time.sleep(3600)"

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *arguments):
        pass

if len(sys.argv) > 2:
    subprocess.Popen([sys.executable, "-c", CHILD, sys.argv[2]])
{signals}
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def peer_command(signals: str = "") -> list[str]:
    return [sys.executable, "-c", PEER.format(signals=signals), PORT]


def test_a_peer_is_told_its_port_and_ended_with_its_children(tmp_path: Path):
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    with tempfile.TemporaryFile("w+") as output:
        with running_peer(
            [*peer_command(), str(fifo)],
            ready_path="/health",
            startup_timeout_s=60,
            output=output,
        ) as server:
            assert server.ready_s > 0
            with urllib.request.urlopen(f"{server.url}/health") as answer:
                assert answer.status == 200
            held = fifo.open()  # as soon as the child has it open
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(f"{server.url}/health")
    with held:
        assert held.read() == ""  # comes to an end only when the child has ended


def test_a_peer_may_end_as_it_likes_when_asked_to():
    signals = "signal.signal(signal.SIGTERM, lambda *_: os._exit(7))"
    with (
        tempfile.TemporaryFile("w+") as output,
        running_peer(
            peer_command(signals), ready_path="/health", startup_timeout_s=60, output=output
        ),
    ):
        pass


def test_a_peer_that_does_not_end_is_ended():
    script = "import signal, time; signal.signal(15, signal.SIG_IGN)\nprint(flush=True)\n"
    script += "time.sleep(3600)"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
    stop_group(process, timeout_s=0.1)
    assert process.returncode == -9


def test_a_peer_that_cannot_be_started_or_ends_by_itself_has_failed():
    with tempfile.TemporaryFile("w+") as output:
        for command, match in (
            (["./missing"], "cannot be started"),
            ([sys.executable, "-c", "exit(3)"], "with exit code 3"),
        ):
            with (
                pytest.raises(ServerFailed, match=match),
                running_peer(command, ready_path="/", startup_timeout_s=60, output=output),
            ):
                pass
