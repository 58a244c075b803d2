"""A pipeline without a server, in a process of its own that is spoken to by lines of JSON."""

import asyncio
import json
import os
import subprocess
import threading
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

from bench.scenario import PlannedRequest
from bench.server_process import ServerFailed, stop_group
from bench.stream import RequestFailed, RequestRecord

__all__ = ["OfflinePipeline", "running_pipeline"]


@dataclass(frozen=True, slots=True)
class OfflinePipeline:
    """A pipeline that is ready.

    Attributes:
        ready_s: seconds from the start of the process until it said so.
        timeout_s: after which an answer does not come any more.
    """

    process: subprocess.Popen[str]
    ready_s: float
    timeout_s: float

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.pid

    async def send_all(
        self, planned: Sequence[PlannedRequest], concurrency: int | None = None
    ) -> list[RequestRecord]:
        """Carry out requests, `concurrency` at a time or all at once; as Sender.send_all.

        Raises:
            RequestFailed: the process has ended, or took too long and was ended.
        """
        job = {
            "concurrency": concurrency,
            "requests": [
                {"prompt": request.prompt, "output_len": request.output_len} for request in planned
            ],
        }
        rows = (await asyncio.to_thread(self._ask, job))["records"]
        records = [record_of(row) for row in rows]
        for record in records:
            asked_for = planned[record.index].output_len
            if record.error is None and record.output_tokens != asked_for:
                record.error = "wrong length"
                record.error_detail = f"{record.output_tokens} tokens instead of {asked_for}"
        return records

    def _ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        try:
            write_line(self.process, job)
            return read_answer(self.process, self.timeout_s)
        except (OSError, ServerFailed) as error:
            raise RequestFailed("pipeline ended", str(error)) from error


@contextmanager
def running_pipeline(
    command: Sequence[str],
    *,
    startup_timeout_s: float,
    timeout_s: float,
    output: IO[str],
    environment: Mapping[str, str],
) -> Iterator[OfflinePipeline]:
    """Start the process of a pipeline, wait until it is ready, and end it with the block.

    Args:
        command: the command line.
        startup_timeout_s: after which it has failed to start.
        timeout_s: the longest that a job may take.
        output: where its stderr goes.
        environment: variables that it gets besides ours.

    Raises:
        ServerFailed: it cannot be started, or was not ready in time.
    """
    start_s = time.perf_counter()
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    except OSError as error:
        raise ServerFailed(f"it cannot be started: {error}") from error
    try:
        read_answer(process, startup_timeout_s)
        yield OfflinePipeline(process, time.perf_counter() - start_s, timeout_s)
    finally:
        stop_group(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what it did not read any more
                    pipe.close()


def write_line(process: subprocess.Popen[str], document: Mapping[str, Any]) -> None:
    """Send a line."""
    if process.stdin is not None:
        process.stdin.write(json.dumps(document) + "\n")
        process.stdin.flush()


def read_answer(process: subprocess.Popen[str], timeout_s: float) -> dict[str, Any]:
    """The next line that is a JSON object; a library may print others.

    Raises:
        ServerFailed: the process has ended, by itself or because it took too long.
    """
    guard = threading.Timer(timeout_s, process.kill)
    guard.start()
    try:
        for line in process.stdout or ():
            if line.startswith("{"):
                document: dict[str, Any] = json.loads(line)
                return document
    finally:
        guard.cancel()
        guard.join()
    raise ServerFailed(f"the pipeline ended with exit code {process.wait()}")


def record_of(row: Mapping[str, Any]) -> RequestRecord:
    """A record from its JSON."""
    fields = dict(row)
    fields["gaps_s"] = array("d", fields["gaps_s"])
    fields["gap_tokens"] = array("L", fields["gap_tokens"])
    return RequestRecord(**fields)
