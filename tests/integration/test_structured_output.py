"""Structured output of the tiny model. Its weights know nothing: what matches is due to masks."""

import asyncio
import json
import re

import pytest

from serving import wait_until_idle

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
CHOICES = ["yes", "no", "perhaps"]


async def post(session, path, body):
    async with session.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def test_every_choice_matches_the_schema(session):
    body = {
        "messages": [{"role": "user", "content": "a pet"}],
        "response_format": FORMAT,
        "n": 3,
        "seed": 1,
        "max_tokens": 200,
    }
    answer = await post(session, CHAT, body)
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        pet = json.loads(choice["message"]["content"])
        assert set(pet) == {"name", "kind", "age"}
        assert pet["kind"] in ("cat", "dog")
        assert 0 <= pet["age"] <= 99


@pytest.mark.parametrize("temperature", [0, 1])
async def test_choices_expressions_and_grammars_are_matched(session, temperature):
    body = {"prompt": "x", "max_tokens": 60, "temperature": temperature, "seed": 5}
    chosen = await post(session, COMPLETIONS, {**body, "guided_choice": CHOICES})
    assert chosen["choices"][0]["text"] in CHOICES
    regex = {"structured_outputs": {"regex": "[a-f]{3}-[0-9]{2}"}}
    matched = await post(session, COMPLETIONS, {**body, **regex})
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", matched["choices"][0]["text"])
    grammar = {"guided_grammar": 'root ::= "(" root ")" | "x"'}
    nested = await post(session, COMPLETIONS, {**body, **grammar})
    assert re.match(r"\(*x?", nested["choices"][0]["text"])


async def test_an_answer_that_is_cut_says_so(session):
    body = {"prompt": "x", "max_tokens": 3, "response_format": FORMAT}
    [choice] = (await post(session, COMPLETIONS, body))["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["text"].startswith("{")


async def test_a_dead_end_is_a_cut_with_its_reason(session):
    """The expression goes on with a token that is not allowed."""
    a, _ = (await post(session, "/tokenize", {"prompt": "ab"}))["tokens"]
    body = {"prompt": "x", "max_tokens": 9, "guided_regex": "ab", "allowed_token_ids": [a]}
    answer = await post(session, COMPLETIONS, body)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("a", "length")
    assert choice["stop_reason"] == "dead_end"
    assert answer["usage"]["completion_tokens"] == 1


async def test_neighbours_change_nothing(session):
    """Requests with and without structure together get what each gets alone."""
    bodies = [
        {"prompt": "one", "max_tokens": 20, "temperature": 0},
        {"prompt": "two", "max_tokens": 20, "temperature": 0, "guided_choice": CHOICES},
        {"prompt": "three", "max_tokens": 60, "seed": 3, "response_format": FORMAT},
        {"prompt": "four", "max_tokens": 20, "seed": 4, "frequency_penalty": 1.0},
    ]
    alone = [(await post(session, COMPLETIONS, body))["choices"][0]["text"] for body in bodies]
    together = await asyncio.gather(*(post(session, COMPLETIONS, body) for body in bodies * 2))
    assert [answer["choices"][0]["text"] for answer in together] == alone * 2
    after = await wait_until_idle(session)
    assert after["compiles_after_ready"] == 0
    assert after["kv_blocks_free"] == after["kv_blocks"]


async def test_scores_of_a_prompt_do_not_depend_on_the_cache(session):
    """As lm-eval asks: the second time the prompt is cached, and scored all the same."""
    ids = list(range(40, 100))
    body = {"prompt": [ids, ids[:30]], "echo": True, "max_tokens": 1, "logprobs": 1}
    body["temperature"] = 0
    first, second = [await post(session, COMPLETIONS, body) for _ in range(2)]
    assert first["choices"] == [
        {**choice, "timing": before["timing"]}
        for choice, before in zip(second["choices"], first["choices"], strict=True)
    ]
    long, short = (choice["logprobs"]["token_logprobs"] for choice in first["choices"])
    assert (len(long), len(short)) == (61, 31)
    assert long[:30] == short[:30]
    assert long[0] is None
    assert all(x <= 0 for x in long[1:])
