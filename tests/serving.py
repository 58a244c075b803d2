"""A real `headrace serve`, started and watched from outside as its users do."""

import asyncio
import os
import queue
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from bench.server_process import find_headrace
from golden_model import TINY_DIR

__all__ = ["TINY", "ServedProcess", "read_metrics", "served", "wait_until_idle"]

# The tiny checkpoint with few programs, so that it starts in seconds. Its 120 blocks are less than
# 8 requests of the full length of 512 tokens need: some lose theirs and are computed again.
TINY = (
    *(str(TINY_DIR / "llama"), "--served-model-name", "tiny"),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "64"),
    *("--block-size", "16", "--num-kv-blocks", "120"),
)

POLL_INTERVAL_S = 0.02


@dataclass
class ServedProcess:
    """A server process.

    Attributes:
        lines: what it has said so far on stderr.
    """

    process: subprocess.Popen[str]
    port_file: Path
    lines: list[str] = field(default_factory=list)
    _unread: "queue.SimpleQueue[str | None]" = field(default_factory=queue.SimpleQueue)

    @property
    def port(self) -> int:
        return int(self.port_file.read_text(encoding="ascii"))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def rss_bytes(self) -> int:
        """Memory that the process holds now."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def wait_for_line(self, text: str) -> None:
        """Return once a line that holds the text was said; each line is looked at once."""
        while (line := self._unread.get()) is not None:
            if text in line:
                return
        raise AssertionError(f"the server ended without saying {text!r}:\n{self.log}")

    def listen(self) -> None:
        """Take in what the process says, until it ends."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            self._unread.put(line)
        self._unread.put(None)


@contextmanager
def served(
    *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[ServedProcess]:
    """Run `headrace serve` on a free port, ready when the block begins; in the end it is stopped.

    Whatever happened in between, it must end well and have logged no traceback.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        port_file = Path(folder) / "port"
        process = subprocess.Popen(
            [find_headrace(), "serve", *arguments, "--port", "0", "--port-file", str(port_file)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        server = ServedProcess(process, port_file)
        listener = threading.Thread(target=server.listen)
        listener.start()
        try:
            server.wait_for_line("metrics ")  # the last line of the start
            yield server
            process.terminate()
            exit_code = process.wait()
        finally:
            process.kill()
            process.wait()
            listener.join()
            assert process.stderr is not None
            process.stderr.close()
    assert exit_code == 0, server.log
    assert "Traceback" not in server.log, server.log


async def read_metrics(session: aiohttp.ClientSession) -> dict[str, float]:
    """Every number of /metrics by its short name, with `{finished_reason}` where it has one."""
    async with session.get("/metrics") as response:
        text = await response.text()
    numbers = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            reason = sample.labels.get("finished_reason")
            name = sample.name.removeprefix("headrace_")
            numbers[f"{name}{{{reason}}}" if reason else name] = sample.value
    return numbers


async def wait_until_idle(session: aiohttp.ClientSession) -> dict[str, float]:
    """Return the metrics once no request runs or waits and no websocket is open."""
    gauges = ("num_requests_running", "num_requests_waiting", "websockets_open")
    while True:
        numbers = await read_metrics(session)
        if not any(numbers[name] for name in gauges):
            return numbers
        await asyncio.sleep(POLL_INTERVAL_S)
