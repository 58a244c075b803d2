"""Calls of tools and thoughts in chat answers, by a model that writes what a script says."""

import json

import pytest

from fakes import ByteChatTemplate

URL = "/v1/chat/completions"
USER = {"role": "user", "content": "Rain?"}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}},
}
PARIS, OSLO = '{"city": "Paris"}', '{"city": "Oslo"}'
TWO_CALLS = "I look.\n" + "\n".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    for arguments in (PARIS, OSLO)
)


class ThinkingTemplate(ByteChatTemplate):
    source = "... </think> ..."


def prompt_text(gateway):
    ids, _ = gateway.engine.submitted[-1]
    return gateway.tokenizer.decode(ids, skip_special=False)


async def chat(gateway, *messages, **body):
    status, answer = await gateway.post(URL, {"messages": messages or [USER], **body})
    assert status == 200, answer
    return answer["choices"][0]


async def streamed(gateway, **body):
    """The choices of all chunks, by their index."""
    body = {"messages": [USER], "tools": [WEATHER], "stream": True, **body}
    choices = {}
    async with gateway.session.post(URL, json=body) as response:
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    choices.setdefault(choice["index"], []).append(choice)
    return choices


async def test_calls_are_told_from_text(gateway):
    gateway.engine.script_all(TWO_CALLS)
    choice = await chat(gateway, tools=[WEATHER])
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "weather", "arguments": PARIS},
        {"name": "weather", "arguments": OSLO},
    ]
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    assert calls[0]["id"] != calls[1]["id"]


async def test_nothing_but_a_call_has_null_content(gateway):
    gateway.engine.script_all('<tool_call>{"name": "weather", "arguments": {}}</tool_call>\n')
    message = (await chat(gateway, tools=[WEATHER]))["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1


async def test_without_tools_nothing_is_a_call(gateway):
    gateway.engine.script_all(TWO_CALLS)
    for fields in ({}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = await chat(gateway, **fields)
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", TWO_CALLS)
        assert "tool_calls" not in choice["message"]
        assert "weather" not in prompt_text(gateway)


async def test_streamed_calls_have_id_and_name_once_and_arguments_in_pieces(gateway):
    gateway.engine.script_all(TWO_CALLS)
    [choices] = (await streamed(gateway)).values()
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == "I look."
    deltas = [c for choice in choices for c in choice["delta"].get("tool_calls", ())]
    for index, arguments in enumerate((PARIS, OSLO)):
        first, *rest = [delta for delta in deltas if delta["index"] == index]
        assert set(first) == {"index", "id", "type", "function"}
        assert first["function"] == {"name": "weather", "arguments": ""}
        assert all(set(delta) == {"index", "function"} for delta in rest)
        assert all(set(delta["function"]) == {"arguments"} for delta in rest)
        assert "".join(delta["function"]["arguments"] for delta in rest) == arguments
    assert len({delta["id"] for delta in deltas if "id" in delta}) == 2
    assert [delta["index"] for delta in deltas] == sorted(delta["index"] for delta in deltas)
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]


async def test_arguments_are_streamed_while_they_are_made(gateway):
    gateway.engine.script_all(TWO_CALLS)
    gateway.engine.hold()
    body = {"messages": [USER], "tools": [WEATHER], "stream": True}
    async with gateway.session.post(URL, json=body) as response:
        await gateway.engine.wait_for_requests(1)
        gateway.engine.step(TWO_CALLS.index("Pa") + 2)
        seen = b""
        while b'"arguments":"{\\"city\\": \\"Pa' not in seen:
            seen += await response.content.readany()
        assert gateway.engine.num_active == 1  # the answer goes on
        assert b'finish_reason":"' not in seen
        gateway.engine.release()
        await response.read()


async def test_choices_have_their_own_calls(gateway):
    gateway.engine.script_all(TWO_CALLS)
    choices = await streamed(gateway, n=2)
    assert sorted(choices) == [0, 1]
    ids = set()
    for of_choice in choices.values():
        deltas = [c for choice in of_choice for c in choice["delta"].get("tool_calls", ())]
        ids |= {delta["id"] for delta in deltas if "id" in delta}
        assert "".join(delta["function"]["arguments"] for delta in deltas) == PARIS + OSLO
    assert len(ids) == 4


async def test_without_parallel_calls_the_first_is_all(gateway):
    gateway.engine.script_all(TWO_CALLS)
    choice = await chat(gateway, tools=[WEATHER], parallel_tool_calls=False)
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == PARIS


async def test_a_call_that_is_cut_off_ends_by_length(gateway):
    gateway.engine.script_all(TWO_CALLS)
    choice = await chat(gateway, tools=[WEATHER], max_tokens=TWO_CALLS.index("Pa") + 2)
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "Pa'


async def test_calls_and_results_of_earlier_turns_reach_the_prompt(gateway):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": PARIS}}
    await chat(
        gateway,
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sun"}]},
        tools=[WEATHER],
        max_tokens=1,
    )
    text = prompt_text(gateway)
    assert json.dumps(WEATHER) in text
    assert f'{{"name": "weather", "arguments": {PARIS}}}' in text
    assert "<tool_response>\nsun\n</tool_response>" in text


async def test_tools_larger_than_the_context_are_refused(gateway):
    big = {"type": "function", "function": {"name": "f", "description": "x" * 5000}}
    status, answer = await gateway.post(URL, {"messages": [USER], "tools": [big]})
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert answer["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_are_apart_from_the_answer(start_gateway, stream):
    gateway = await start_gateway(chat_template=ThinkingTemplate())
    gateway.engine.script_all("<think>\nHm.\n</think>\n\nYes.")
    if stream:
        [choices] = (await streamed(gateway, tools=None)).values()
        thoughts = "".join(c["delta"].get("reasoning_content", "") for c in choices)
        text = "".join(c["delta"].get("content", "") for c in choices)
    else:
        message = (await chat(gateway))["message"]
        thoughts, text = message["reasoning_content"], message["content"]
    assert (thoughts, text) == ("Hm.", "Yes.")


async def test_thoughts_stay_in_the_text_if_nobody_wants_them_apart(start_gateway):
    gateway = await start_gateway(chat_template=ThinkingTemplate(), reasoning_parser="none")
    gateway.engine.script_all("<think>Hm</think>Yes")
    message = (await chat(gateway))["message"]
    assert message["content"] == "<think>Hm</think>Yes"
    assert "reasoning_content" not in message


async def test_an_answer_of_thoughts_alone_has_no_content(start_gateway):
    gateway = await start_gateway(chat_template=ThinkingTemplate())
    gateway.engine.script_all("<think>Hm, and so on")
    message = (await chat(gateway))["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, and so on", None)


async def test_more_calls_than_anybody_makes_are_refused(gateway):
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call] * 4097}
    status, answer = await gateway.post(URL, {"messages": [USER, message]})
    assert (status, answer["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
async def test_a_number_in_a_forced_tool_that_cannot_be_written_is_refused(gateway, choice):
    parameters = {"properties": {"n": {"maximum": 2**64}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {"messages": [USER], "tools": [tool], "tool_choice": choice}
    status, answer = await gateway.post(URL, body)
    assert (status, answer["error"]["param"]) == (400, "tools[0].function.parameters")


@pytest.mark.parametrize("stream", [False, True])
async def test_half_a_character_in_a_call_stays_an_escape(gateway, stream):
    arguments = r'"{\"city\": \"\ud800\"}"'
    gateway.engine.script_all(
        f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    )
    if stream:
        [choices] = (await streamed(gateway)).values()
        calls = [call for c in choices for call in c["delta"].get("tool_calls", ())]
        written = "".join(call["function"]["arguments"] for call in calls)
    else:
        [call] = (await chat(gateway, tools=[WEATHER]))["message"]["tool_calls"]
        written = call["function"]["arguments"]
    assert written == arguments
