import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.comparison.offline import OfflinePipeline, running_pipeline
from bench.scenario import PlannedRequest
from bench.server_process import ServerFailed
from bench.stream import RequestFailed

# A driver that gives a token less than was asked for when the prompt is [9], and dies of a [6].
DRIVER = """
import json, sys
print("a library says hello")
print('{"ready": true}', flush=True)
for line in sys.stdin:
    job = json.loads(line)
    records = []
    for index, request in enumerate(job["requests"]):
        if request["prompt"] == [6]:
            sys.exit(3)
        count = request["output_len"] - (request["prompt"] == [9])
        records.append({
            "index": index, "start_s": 0.5, "prompt_tokens": 1, "method": "token_ids",
            "output_tokens": count, "first_token_s": 0.1, "last_token_s": 0.3, "first_tokens": 1,
            "gaps_s": [0.2], "gap_tokens": [count - 1], "end_s": 0.3, "finish_reason": "length",
            "error": None, "error_detail": str(job["concurrency"]),
        })
    print(json.dumps({"records": records}), flush=True)
"""


@contextmanager
def running(script: str = DRIVER, startup_timeout_s: float = 60) -> Iterator[OfflinePipeline]:
    with (
        tempfile.TemporaryFile("w+") as output,
        running_pipeline(
            [sys.executable, "-c", script],
            startup_timeout_s=startup_timeout_s,
            timeout_s=60,
            output=output,
            environment={},
        ) as pipeline,
    ):
        yield pipeline


def request(prompt: list[int]) -> PlannedRequest:
    return PlannedRequest(prompt=prompt, output_len=3)


async def test_records_come_back_as_from_a_server():
    with running() as pipeline:
        assert pipeline.ready_s > 0
        (record,) = await pipeline.send_all([request([1])], concurrency=4)
        assert record.error is None
        assert record.error_detail == "4"
        assert list(record.gaps_s) == [0.2]
        assert list(record.gap_tokens) == [2]
        assert record.output_tokens == 3
        (record,) = await pipeline.send_all([request([9])])
        assert record.error == "wrong length"
        assert record.error_detail == "2 tokens instead of 3"
    assert pipeline.process.returncode is not None


async def test_a_pipeline_that_ends_fails_the_workload():
    with running() as pipeline:
        with pytest.raises(RequestFailed, match=r"pipeline ended: .* exit code 3"):
            await pipeline.send_all([request([6])])
        with pytest.raises(RequestFailed, match="pipeline ended"):
            await pipeline.send_all([request([1])])


def test_a_pipeline_that_ends_before_it_is_ready_has_failed():
    with pytest.raises(ServerFailed, match="ended with exit code 5"), running("exit(5)"):
        pass


def test_a_pipeline_that_takes_too_long_is_ended():
    script = "import time; time.sleep(3600)"
    with pytest.raises(ServerFailed, match="exit code -9"), running(script, 0.3):
        pass


def test_a_program_that_is_not_there_has_failed():
    with (
        tempfile.TemporaryFile("w+") as output,
        pytest.raises(ServerFailed, match="cannot be started"),
        running_pipeline(
            ["./missing"], startup_timeout_s=1, timeout_s=1, output=output, environment={}
        ),
    ):
        pass
