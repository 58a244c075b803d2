"""Tools by the stock `openai` package: scripted answers, and forced calls of a real engine."""

import json

import openai
import pytest

USER = {"role": "user", "content": "Rain?"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "clock"}}
PARIS = '{"city": "Paris"}'
CALLS = "I look." + "".join(
    f'\n<tool_call>\n{{"name": "{name}", "arguments": {PARIS}}}\n</tool_call>'
    for name in ("weather", "clock")
)


@pytest.fixture
async def client(gateway):
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def test_a_conversation_with_tools_and_their_results(gateway, client):
    gateway.engine.script_all(CALLS)
    options = {"model": "tiny", "tools": [WEATHER, CLOCK]}
    answer = await client.chat.completions.create(messages=[USER], **options)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["weather", "clock"]
    assert all(json.loads(call.function.arguments) == {"city": "Paris"} for call in calls)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in calls]
    gateway.engine.script_all("No rain.")
    answer = await client.chat.completions.create(
        messages=[USER, choice.message.model_dump(), *results], **options
    )
    assert answer.choices[0].message.content == "No rain."
    assert answer.choices[0].message.tool_calls is None


async def test_the_accumulating_stream_helper_gets_the_calls(gateway, client):
    gateway.engine.script_all(CALLS)
    async with client.chat.completions.stream(
        model="tiny", messages=[USER], tools=[WEATHER, CLOCK]
    ) as stream:
        kinds = [event.type async for event in stream]
        answer = await stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == 2
    calls = answer.choices[0].message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("weather", PARIS),
        ("clock", PARIS),
    ]


@pytest.mark.parametrize(
    ("choice", "script"),
    [
        (NAMED, PARIS),
        ("required", f'[{{"name": "clock", "arguments": {PARIS}}}]'),
    ],
)
async def test_a_forced_call_is_streamed_as_one_that_is_not(gateway, client, choice, script):
    gateway.engine.script_all(script)
    stream = await client.chat.completions.create(
        model="tiny", messages=[USER], tools=[WEATHER, CLOCK], tool_choice=choice, stream=True
    )
    deltas, reasons = [], []
    async for chunk in stream:
        deltas += chunk.choices[0].delta.tool_calls or []
        reasons.append(chunk.choices[0].finish_reason)
    assert (deltas[0].index, deltas[0].function.name) == (0, "clock")
    assert "".join(delta.function.arguments for delta in deltas) == PARIS
    assert reasons[-1] == "tool_calls"
    [(_, params)] = gateway.engine.submitted
    assert params.grammar is not None


async def test_a_forced_call_excludes_another_structure(client):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model="tiny",
            messages=[USER],
            tools=[WEATHER],
            tool_choice="required",
            response_format={"type": "json_object"},
        )
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("choice", [{"type": "function", "function": {"name": "f"}}, "required"])
def test_a_real_engine_makes_the_call_that_is_forced(tiny_server, choice):
    parameters = {"properties": {"a": {"enum": [1, 2]}}, "additionalProperties": False}
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "?"}],
            tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}],
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
            logit_bias={str(byte): -100 for byte in b" \n\t"},  # there is little room
        )
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls", answer
    [call] = choice.message.tool_calls
    assert call.function.name == "f"
    assert json.loads(call.function.arguments).get("a", 1) in (1, 2)


def test_a_real_engine_keeps_to_the_format_of_a_response(tiny_server):
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none") as client:
        response = client.responses.create(
            model="tiny",
            input="Rain?",
            text={"format": {"type": "json_schema", "name": "city", "schema": SCHEMA}},
            max_output_tokens=150,
            temperature=0,
        )
        assert json.loads(response.output_text)["city"] in ("Paris", "Oslo")
        assert response.text.format.type == "json_schema"
