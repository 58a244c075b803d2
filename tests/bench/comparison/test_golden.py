import json
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.comparison.golden import GoldenCase, GoldenResult, check_golden, load_golden
from bench.scenario import Sender
from bench.stream import RequestFailed
from bench.target import Target, open_session
from golden_model import GOLDEN_DIR

CASES = [
    GoldenCase(prompt_ids=[1], output_ids=[5, 6, 7], margins=[1.0, 1.0, 1.0]),
    GoldenCase(prompt_ids=[2], output_ids=[8, 9], margins=[1.0, 0.05]),
]


async def check(answers: dict[int, list[int] | None]) -> GoldenResult:
    """Check a server that answers a prompt of one token so."""

    async def completions(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["temperature"] == 0
        assert body["model"] == "m"
        choice = {"text": "", "token_ids": answers[body["prompt"][0]]}
        assert body["max_tokens"] == {1: 3, 2: 2}[body["prompt"][0]]
        return web.json_response({"choices": [choice]})

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    async with TestServer(app) as server, open_session(None, 10) as session:
        sender = Sender(session, Target(url=str(server.make_url("/")), model="m"))
        return await check_golden(sender, CASES)


async def test_equal_answers_hold():
    result = await check({1: [5, 6, 7], 2: [8, 9]})
    assert result == GoldenResult(num_cases=2, num_equal=2, num_held=2, tokens_held=5, num_tokens=5)
    assert result.holds
    assert result.as_dict()["holds"] is True


async def test_another_choice_between_two_close_tokens_holds():
    result = await check({1: [5, 6, 7], 2: [8, 1]})
    assert (result.num_equal, result.num_held, result.tokens_held) == (1, 2, 4)
    assert result.holds


async def test_another_choice_between_tokens_that_are_apart_does_not_hold():
    result = await check({1: [5, 1, 7], 2: [8, 9]})
    assert (result.num_equal, result.num_held, result.tokens_held) == (1, 1, 3)
    assert not result.holds


async def test_an_answer_that_ends_too_early_does_not_hold():
    assert not (await check({1: [5, 6], 2: [8, 9]})).holds


async def test_a_server_that_tells_no_ids_cannot_be_checked():
    with pytest.raises(RequestFailed, match="golden: no token ids in"):
        await check({1: None, 2: [8, 9]})


def test_the_golden_answers_of_the_default_model_can_be_read(tmp_path: Path):
    cases = load_golden(GOLDEN_DIR / "golden_smollm2.json")
    assert len(cases) == 12
    assert cases[0].output_ids == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    path = tmp_path / "golden.json"
    path.write_text(json.dumps({"cases": []}))
    assert load_golden(path) == []
