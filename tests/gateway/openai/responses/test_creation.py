import pytest

from fakes import FakeEngine
from gateway.callers import anonymous_caller
from gateway.config import GatewayConfig
from gateway.errors import GatewayError
from gateway.openai.responses.creation import create_run, read_body
from gateway.openai.responses.service import ResponseService

TOOL = {"type": "function", "name": "f", "description": "Does f.", "parameters": {"a": 1}}

FORCED = {"type": "function", "name": "f"}


@pytest.fixture
def create(make_generator):
    async def make(body, stores=(), caller=None, engine=None):
        return await create_run(
            read_body(body),
            caller=caller or anonymous_caller(None, None),
            generator=make_generator(engine or FakeEngine()),
            config=GatewayConfig(served_model_names=("tiny",)),
            stores=stores,
        )

    return make


async def test_the_response_tells_back_what_was_asked(create):
    body = {
        "model": "tiny",
        "input": "Hi",
        "instructions": "Be kind.",
        "tools": [TOOL],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "top_p": 0.25,
        "max_output_tokens": 7,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "reasoning": {"effort": "low", "summary": None},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "truncation": "disabled",
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "unknown": 1,
    }
    response = (await create(body)).response
    assert response.status == "in_progress"
    assert response.id.startswith("resp_")
    assert (response.instructions, response.metadata) == ("Be kind.", {"a": "b"})
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 0.25, 7)
    assert (response.max_tool_calls, response.parallel_tool_calls) == (3, False)
    assert (response.reasoning.effort, response.text.verbosity) == ("low", "low")
    assert (response.store, response.tool_choice) == (False, "auto")
    assert response.tools[0].name == "f"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "x", "content": "y"}]}, "input[0].role"),
        ({"input": "x" * 5000}, "input"),
        ({"input": "x", "model": "other"}, "model"),
        ({"input": "x", "max_output_tokens": 100_000}, "max_output_tokens"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "temperature": -1}, "temperature"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        (
            {"input": "x", "tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}},
            "tool_choice.name",
        ),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        (
            {"input": "x", "tools": [{**TOOL, "parameters": {"type": "x"}}], "tool_choice": FORCED},
            "tools[0].parameters",
        ),
        ({"input": "x", "include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"input": "x", "metadata": {"a": "b" * 513}}, "metadata"),
        ({"input": "x", "metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"input": "x", "metadata": {"a": 1}}, "metadata[...]"),
        ({"input": "x", "background": True, "store": False}, "store"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "top_logprobs": 3}, "top_logprobs"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "previous_response_id": 1}, "previous_response_id"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(create, body, param):
    engine = FakeEngine()
    with pytest.raises(GatewayError) as caught:
        await create(body, engine=engine)
    assert 400 <= caught.value.status < 500
    assert caught.value.param == param
    assert engine.submitted == []


async def test_instructions_are_not_handed_on_but_the_conversation_is(create):
    service, caller = ResponseService(1 << 20), anonymous_caller(None, "Bearer me")
    engine = FakeEngine()
    engine.script_all("Hello")
    first = await create({"input": "Hi", "instructions": "One."}, engine=engine)
    async for _ in first.events():
        pass
    service.keep(caller.principal, first)
    body = {
        "input": "More",
        "instructions": "Two.",
        "previous_response_id": first.response.id,
    }
    second = await create(body, [ResponseService(1).store, service.store], caller)
    assert [m.content for m in second.conversation] == ["Hi", "Hello", "More"]
    with pytest.raises(GatewayError) as caught:
        await create(body, [service.store], anonymous_caller(None, "Bearer you"))
    assert caught.value.code == "previous_response_not_found"


async def test_an_effort_of_none_asks_for_no_thoughts(create):
    engine = FakeEngine()
    run = await create({"input": "Hi", "reasoning": {"effort": "none"}}, engine=engine)
    async for _ in run.events():
        pass
    [(prompt, _)] = engine.submitted
    assert bytes(i for i in prompt if i < 256).endswith(b"thinks: False\n")


async def test_a_response_that_runs_cannot_be_gone_on_with(create):
    service = ResponseService(1 << 20)
    engine = FakeEngine()
    engine.hold()
    stored = await service.start("", await create({"input": "Hi"}, engine=engine))
    with pytest.raises(GatewayError) as caught:
        await create({"input": "x", "previous_response_id": stored.response.id}, [service.store])
    assert caught.value.param == "previous_response_id"
    await service.close()


async def test_more_calls_than_anybody_makes_are_refused(create):
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    with pytest.raises(GatewayError, match="at most 4096 calls") as caught:
        await create({"input": [call] * 4097})
    assert (caught.value.status, caught.value.param) == (400, "input")


async def test_a_number_in_a_forced_tool_that_cannot_be_written_is_refused(create):
    tool = {**TOOL, "parameters": {"maximum": 2**64}}
    with pytest.raises(GatewayError) as caught:
        await create({"input": "x", "tools": [tool], "tool_choice": FORCED})
    assert (caught.value.status, caught.value.param) == (400, "tools[0].parameters")
