"""What a conversation remembers, and what the model is told."""

import json

import pytest

from fakes import FakeEngine
from headrace_client import AsyncClient, BadRequest, Conversation
from stream_app import serve_streams


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def told(engine: FakeEngine) -> list[str]:
    """Return each prompt so far, without special tokens."""
    return [bytes(i for i in prompt if i < 256).decode() for prompt, _ in engine.submitted]


@pytest.fixture
async def server():
    async with serve_streams() as gateway, AsyncClient(gateway.base_url, max_retries=0) as client:
        yield gateway.engine, client


async def test_each_question_is_asked_with_all_turns_before_it(server):
    engine, client = server
    engine.script_all("Yes.")
    conversation = Conversation(client, system="Be brief.", max_tokens=50)
    assert await conversation.ask("One?") == "Yes."
    assert "".join([d.text async for d in conversation.stream("Two?", max_tokens=2)]) == "Ye"
    assert conversation.messages == [
        said("user", "One?"),
        said("assistant", "Yes."),
        said("user", "Two?"),
        said("assistant", "Ye"),
    ]
    first, second = told(engine)
    assert first == "system\nBe brief.\nuser\nOne?\nassistant\n"
    assert second.startswith("system\nBe brief.\nuser\nOne?\nassistant\nYes.\nuser\nTwo?")
    assert [params.max_tokens for _, params in engine.submitted] == [50, 2]
    assert conversation.last is not None
    assert conversation.last.finish_reason == "length"


async def test_a_question_that_fails_or_is_left_is_not_remembered(server):
    engine, client = server
    conversation = Conversation(client, max_tokens=5)
    with pytest.raises(BadRequest):
        await conversation.ask("refuse")
    answer = conversation.stream("Left in the middle?")
    await anext(answer)
    await answer.aclose()
    await engine.wait_until_idle()
    assert conversation.messages == []


async def test_turns_can_be_undone_cleared_stored_and_continued(server):
    engine, client = server
    engine.script_all("ok")
    conversation = Conversation(client)
    for question in ("a", "b"):
        await conversation.ask(question)
    conversation.undo()
    assert conversation.messages == [said("user", "a"), said("assistant", "ok")]
    other = Conversation(client, messages=json.loads(json.dumps(conversation.messages)))
    conversation.clear()
    conversation.undo()
    assert conversation.messages == []
    await other.ask("c")
    assert told(engine)[-1].startswith("user\na\nassistant\nok\nuser\nc\n")
