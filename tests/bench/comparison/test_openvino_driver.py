import io
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from bench.comparison.openvino_driver import Driver, main

RUNNING, FINISHED, IGNORED = "running", "finished", "ignored"


class Handle:
    """A request that gets one token a step."""

    def __init__(self, prompt: list[int], config: Any) -> None:
        self.prompt = prompt
        self.config = config
        self.num_left = config.max_new_tokens
        self.unread = 0

    def step(self) -> None:
        self.num_left -= 1
        self.unread += 1

    def get_status(self) -> str:
        if self.prompt == [13]:
            return IGNORED
        return RUNNING if self.num_left else FINISHED

    def can_read(self) -> bool:
        return self.unread > 0

    def read(self) -> dict[int, Any]:
        outputs = {0: SimpleNamespace(generated_ids=[7] * self.unread)}
        self.unread = 0
        return outputs


class Pipeline:
    """Counts what runs in each step; a step takes a second of `clock`."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments
        self.running: list[Handle] = []
        self.sizes: list[int] = []
        self.ids: list[int] = []
        self.now_s = 100.0

    def clock(self) -> float:
        return self.now_s

    def add_request(self, request_id: int, prompt: list[int], config: Any) -> Handle:
        self.ids.append(request_id)
        handle = Handle(prompt, config)
        assert config.ignore_eos
        assert not config.do_sample
        self.running.append(handle)
        return handle

    def step(self) -> None:
        self.now_s += 1
        self.sizes.append(len(self.running))
        for handle in self.running:
            if handle.prompt != [13]:
                handle.step()
        self.running = [handle for handle in self.running if handle.get_status() == RUNNING]


GENAI = SimpleNamespace(
    GenerationConfig=SimpleNamespace,
    GenerationStatus=SimpleNamespace(RUNNING=RUNNING, FINISHED=FINISHED),
    SchedulerConfig=SimpleNamespace,
    ContinuousBatchingPipeline=Pipeline,
)


def job(concurrency: int | None, *lengths: int) -> dict[str, Any]:
    requests = [{"prompt": [1, 2], "output_len": length} for length in lengths]
    return {"concurrency": concurrency, "requests": requests}


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline()


@pytest.fixture
def driver(pipeline: Pipeline) -> Driver:
    return Driver(pipeline, GENAI, list, pipeline.clock)


def test_a_request_that_ends_is_replaced_at_once(driver: Driver, pipeline: Pipeline):
    records = driver.run(job(2, 1, 3, 2))
    assert pipeline.sizes == [2, 2, 2]
    assert [record["output_tokens"] for record in records] == [1, 3, 2]
    assert [record["start_s"] for record in records] == [0, 0, 1]
    assert [record["first_token_s"] for record in records] == [1, 1, 1]
    assert [record["gaps_s"] for record in records] == [[], [1, 1], [1]]
    assert [record["gap_tokens"] for record in records] == [[], [1, 1], [1]]
    assert [record["end_s"] for record in records] == [1, 3, 2]
    assert {record["finish_reason"] for record in records} == {"length"}
    assert {record["prompt_tokens"] for record in records} == {2}


def test_without_a_concurrency_all_are_added_at_once(driver: Driver, pipeline: Pipeline):
    driver.run(job(None, 2, 2, 2))
    assert pipeline.sizes == [3, 3]


def test_requests_of_different_jobs_have_different_numbers(driver: Driver, pipeline: Pipeline):
    driver.run(job(1, 1))
    driver.run(job(1, 1))
    assert len(set(pipeline.ids)) == 2


def test_a_request_that_the_pipeline_drops_is_a_failure(driver: Driver):
    requests = [{"prompt": [13], "output_len": 4}, {"prompt": [1], "output_len": 1}]
    records = driver.run({"concurrency": None, "requests": requests})
    assert [record["error"] for record in records] == ["dropped", None]
    assert records[0]["error_detail"] == IGNORED


def test_jobs_are_read_and_answered_by_lines(monkeypatch: pytest.MonkeyPatch):
    numpy = SimpleNamespace(array=lambda rows, _: rows[0], int64=None)
    monkeypatch.setitem(sys.modules, "openvino_genai", GENAI)
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Tensor=list))
    monkeypatch.setitem(sys.modules, "numpy", numpy)
    answers = io.StringIO()
    main("m.gguf", [json.dumps(job(1, 2))], answers)
    ready, answer = map(json.loads, answers.getvalue().splitlines())
    assert ready == {"ready": True}
    assert answer["records"][0]["output_tokens"] == 2
