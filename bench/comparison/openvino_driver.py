"""OpenVINO GenAI's continuous batching, driven by `headrace bench peers` without any server.

Runs in the interpreter of OpenVINO's environment, so it imports nothing of ours:

    PYTHON -I openvino_driver.py MODEL.gguf

Writes a JSON line when the pipeline is ready. Then each line read is a job, answered by a line:

    {"concurrency": 8, "requests": [{"prompt": [1, 2], "output_len": 4}, ...]}
    {"records": [{"index": 0, "start_s": 0.0, "first_token_s": 0.1, ...}, ...]}

Records have the fields of bench.stream.RequestRecord; times begin with the job. A concurrency of
null adds all requests at once.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

__all__ = ["Driver", "main"]


class Driver:
    """A pipeline, and requests on their way through it.

    Args:
        pipeline: a ContinuousBatchingPipeline.
        genai: the module that it is from.
        make_tensor: makes its input of token ids.
        clock: seconds.
    """

    def __init__(
        self,
        pipeline: Any,
        genai: Any,
        make_tensor: Callable[[list[int]], object],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._pipeline = pipeline
        self._genai = genai
        self._make_tensor = make_tensor
        self._clock = clock
        self._num_requests = 0

    def run(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """Carry out a job, and return its records in the order of its requests."""
        begin_s = self._clock()
        requests = job["requests"]
        waiting = iter(enumerate(requests))
        running: list[tuple[Any, dict[str, Any]]] = []
        records: list[dict[str, Any]] = []
        room = job["concurrency"] or len(requests)
        while True:
            for index, request in take(waiting, room - len(running)):
                record = new_record(index, self._clock() - begin_s, len(request["prompt"]))
                records.append(record)
                running.append((self._add(request), record))
            if not running:
                return records
            self._pipeline.step()
            now_s = self._clock() - begin_s
            running = [entry for entry in running if self._is_running(*entry, now_s)]

    def _add(self, request: dict[str, Any]) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = request["output_len"]
        config.ignore_eos = True
        config.do_sample = False
        self._num_requests += 1
        tensor = self._make_tensor(request["prompt"])
        return self._pipeline.add_request(self._num_requests, tensor, config)

    def _is_running(self, handle: Any, record: dict[str, Any], now_s: float) -> bool:
        """Account for what a step has brought; say whether there is more to come."""
        status = handle.get_status()
        num_tokens = 0
        while handle.can_read():
            num_tokens += sum(len(output.generated_ids) for output in handle.read().values())
        if num_tokens:
            note_tokens(record, now_s - record["start_s"], num_tokens)
        if status == self._genai.GenerationStatus.RUNNING:
            return True
        record["end_s"] = now_s - record["start_s"]
        if status == self._genai.GenerationStatus.FINISHED:
            record["finish_reason"] = "length"
        else:
            record["error"], record["error_detail"] = "dropped", str(status)
        return False


def take(waiting: Iterator[Any], count: int) -> Iterator[Any]:
    """Up to so many of those that wait."""
    for _ in range(count):
        try:
            yield next(waiting)
        except StopIteration:
            return


def new_record(index: int, start_s: float, prompt_tokens: int) -> dict[str, Any]:
    """A record before its first token."""
    return {
        "index": index,
        "start_s": start_s,
        "prompt_tokens": prompt_tokens,
        "method": "token_ids",
        "output_tokens": 0,
        "first_token_s": None,
        "last_token_s": None,
        "first_tokens": 0,
        "gaps_s": [],
        "gap_tokens": [],
        "end_s": None,
        "finish_reason": None,
        "error": None,
        "error_detail": None,
    }


def note_tokens(record: dict[str, Any], now_s: float, num_tokens: int) -> None:
    """Tokens came, so long after the start of their request."""
    record["output_tokens"] += num_tokens
    if record["first_token_s"] is None:
        record["first_token_s"] = now_s
        record["first_tokens"] = num_tokens
    else:
        record["gaps_s"].append(now_s - record["last_token_s"])
        record["gap_tokens"].append(num_tokens)
    record["last_token_s"] = now_s


def main(model: str, jobs: Iterable[str], answers: IO[str]) -> None:
    """Load a model, say so, and carry out jobs until there are no more."""
    genai = importlib.import_module("openvino_genai")
    numpy = importlib.import_module("numpy")
    tensor = importlib.import_module("openvino").Tensor
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True  # as all servers have it
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU")
    driver = Driver(pipeline, genai, lambda ids: tensor(numpy.array([ids], numpy.int64)))
    answer(answers, {"ready": True})
    for line in jobs:
        answer(answers, {"records": driver.run(json.loads(line))})


def answer(answers: IO[str], document: dict[str, Any]) -> None:
    """Write a line."""
    answers.write(json.dumps(document) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.stdin, sys.stdout)
