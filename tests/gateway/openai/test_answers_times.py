"""Answers that their own time limits end."""

import asyncio
import json

import pytest

from fakes import FakeEngine
from jaxengine.outputs import FinishReason

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PROMPTS = {CHAT: {"messages": [{"role": "user", "content": "yo"}]}, COMPLETIONS: {"prompt": "Hi!"}}
both_endpoints = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


async def answer(gateway, path, reason, *, num_tokens=0, **body):
    """Ask, let so many steps pass, and then the time; return status, headers and text."""
    engine = gateway.engine
    engine.hold()

    async def ask():
        async with gateway.session.post(path, json={**PROMPTS[path], **body}) as response:
            return response.status, response.headers, await response.text()

    task = asyncio.create_task(ask())
    await engine.wait_for_requests(1)
    engine.step(num_tokens)
    engine.expire(reason)
    return await task


def events(text):
    return [e.removeprefix("data: ") for e in text.removesuffix("\n\n").split("\n\n")]


def text_of(choice):
    if "text" in choice:
        return choice["text"]
    return (choice.get("message") or choice["delta"])["content"]


@both_endpoints
async def test_a_request_that_never_started_is_status_429(gateway, path):
    status, headers, text = await answer(gateway, path, FinishReason.QUEUE_TIMEOUT)
    error = json.loads(text)["error"]
    assert (status, headers["Retry-After"]) == (429, "1")
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_timeout")


@both_endpoints
async def test_in_a_stream_it_is_an_error_event_and_no_done(gateway, path):
    status, _, text = await answer(gateway, path, FinishReason.QUEUE_TIMEOUT, stream=True)
    [event] = events(text)
    assert status == 200
    assert json.loads(event)["error"]["code"] == "queue_timeout"


@both_endpoints
async def test_at_the_deadline_the_answer_ends_with_what_there_is(gateway, path):
    status, _, text = await answer(gateway, path, FinishReason.DEADLINE, num_tokens=2)
    body = json.loads(text)
    [choice] = body["choices"]
    assert status == 200
    assert len(text_of(choice)) == 2
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")
    assert body["usage"]["completion_tokens"] == 2


@both_endpoints
async def test_a_stream_ends_as_well_as_any_other(gateway, path):
    _, _, text = await answer(gateway, path, FinishReason.DEADLINE, num_tokens=2, stream=True)
    *chunks, done = events(text)
    assert done == "[DONE]"
    choices = [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]
    assert len("".join(map(text_of, choices))) == 2
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
    assert choices[-1]["stop_reason"] == "deadline"


@both_endpoints
async def test_a_deadline_before_the_first_token_is_an_error_that_nobody_repeats(gateway, path):
    status, headers, text = await answer(gateway, path, FinishReason.DEADLINE)
    assert status == 429
    assert headers["x-should-retry"] == "false"
    assert "Retry-After" not in headers
    assert json.loads(text)["error"]["code"] == "deadline_exceeded"


@both_endpoints
async def test_in_a_stream_that_is_an_error_event(gateway, path):
    _, _, text = await answer(gateway, path, FinishReason.DEADLINE, stream=True)
    [event] = events(text)
    assert json.loads(event)["error"]["code"] == "deadline_exceeded"


async def test_one_choice_that_never_started_ends_the_others(start_gateway):
    gateway = await start_gateway(FakeEngine(max_num_seqs=1))
    status, _, _ = await answer(gateway, COMPLETIONS, FinishReason.QUEUE_TIMEOUT, num_tokens=2, n=2)
    assert status == 429
    assert (gateway.engine.num_active, gateway.engine.num_aborts) == (0, 1)


async def test_preemptions_are_told(gateway):
    gateway.engine.num_preemptions = 2
    body = {"prompt": "Hi!", "max_tokens": 1}
    _, answered = await gateway.post(COMPLETIONS, body)
    assert answered["choices"][0]["timing"]["num_preemptions"] == 2
