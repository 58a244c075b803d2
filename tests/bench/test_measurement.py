import io

import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from bench.measurement import BenchPlan, LevelResult, make_document, measure
from bench.summary import Goodput, LoadLevel
from bench.target import Target
from bench.workload import WorkloadConfig


class ScriptedServer:
    """Answers every prompt with as many tokens as it asks for, at once, and keeps the bodies."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/version", self.version)
        app.router.add_post("/v1/completions", self.completions)
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self.server.make_url("/"))

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "max_model_len": 64}]})

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "9.9"})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        response = web.StreamResponse()
        await response.prepare(request)
        for count in range(1, body["max_tokens"] + 1):
            last = count == body["max_tokens"]
            choice = {"index": 0, "text": "x", "finish_reason": "length" if last else None}
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
            chunk = {"choices": [choice], "usage": usage}
            await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def make_plan(url: str, *levels: LoadLevel, **fields: object) -> BenchPlan:
    return BenchPlan(
        target=Target(url=url, model="", api_key="secret"),
        workload=WorkloadConfig(input_len=6, output_len=3, seed=1),
        levels=levels,
        **fields,
    )


def quiet() -> Console:
    return Console(file=io.StringIO())


async def test_every_level_is_measured_after_its_warm_up_and_no_prompt_is_sent_twice():
    scripted = ScriptedServer()
    async with scripted.server:
        plan = make_plan(scripted.url, LoadLevel(concurrency=2), LoadLevel(request_rate=1000.0))
        plan, server, results = await measure(plan, quiet())
    assert plan.target.model == "tiny"
    assert server == {
        "model": {"id": "tiny", "max_model_len": 64},
        "version": {"version": "9.9"},
    }
    assert [result.summary.num_requests for result in results] == [16, 64]
    assert [result.summary.output_tokens for result in results] == [48, 192]
    assert all(result.summary.num_failed == 0 for result in results)
    assert all(result.summary.token_count_method == "usage" for result in results)
    # 2 warm-up requests for two streams, 4 for the open loop.
    assert len(scripted.bodies) == 2 + 16 + 4 + 64
    prompts = {tuple(body["prompt"]) for body in scripted.bodies}
    assert len(prompts) == len(scripted.bodies)
    assert {body["model"] for body in scripted.bodies} == {"tiny"}


async def test_counts_can_be_chosen():
    scripted = ScriptedServer()
    async with scripted.server:
        plan = make_plan(scripted.url, LoadLevel(concurrency=4), num_prompts=5, num_warmups=0)
        _, _, results = await measure(plan, quiet())
    assert len(scripted.bodies) == 5
    assert results[0].summary.prompt_tokens == 30


async def test_the_document_holds_everything_but_the_key():
    scripted = ScriptedServer()
    async with scripted.server:
        plan = make_plan(
            scripted.url, LoadLevel(concurrency=1), num_prompts=2, goodput=Goodput(ttft_ms=1e9)
        )
        plan, server, results = await measure(plan, quiet())
    document = make_document(plan, server, results, ["headrace", "bench"], with_requests=True)
    written = orjson.loads(orjson.dumps(document))
    assert written["schema"] == "headrace.bench.serve/1"
    assert written["target"]["model"] == "tiny"
    assert written["workload"]["seed"] == 1
    assert len(written["runs"][0]["requests"]) == 2
    assert written["runs"][0]["goodput_per_s"] > 0
    assert b"secret" not in orjson.dumps(document)


def test_requests_are_left_out_unless_asked_for():
    plan = make_plan("http://x", LoadLevel(concurrency=1))
    results: list[LevelResult] = []
    document = make_document(plan, {}, results, ["headrace"], with_requests=False)
    assert document["runs"] == []
    assert document["goodput"] is None
