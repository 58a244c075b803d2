"""Responses by the stock `openai` package, over HTTP and server-sent events."""

import asyncio

import openai
import pytest

from fakes import ByteChatTemplate, FakeEngine

WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = 'I look.\n<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


class ThinkingTemplate(ByteChatTemplate):
    source = "... </think> ..."


@pytest.fixture
async def client_of():
    clients = []

    def make(gateway, api_key="none"):
        client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=api_key, max_retries=0)
        clients.append(client)
        return client

    yield make
    for client in clients:
        await client.close()


@pytest.fixture
def client(gateway, client_of):
    return client_of(gateway)


def prompt_text(gateway):
    ids, _ = gateway.engine.submitted[-1]
    return gateway.tokenizer.decode(ids, skip_special=False)


def without_repeats(kinds):
    return [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]


async def collect(stream):
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


async def test_a_whole_response(gateway, client):
    gateway.engine.script_all("Hello!")
    response = await client.responses.create(
        model="tiny", input="Hi", instructions="Be kind.", metadata={"a": "b"}
    )
    assert response.status == "completed"
    assert response.output_text == "Hello!"
    assert (response.instructions, response.metadata) == ("Be kind.", {"a": "b"})
    assert response.usage.output_tokens == len("Hello!") + 1  # the end is a token as well
    assert response.usage.total_tokens == response.usage.input_tokens + 7
    assert "system\nBe kind.<|im_end|>" in prompt_text(gateway)


async def test_all_events_of_a_text_in_their_order(gateway, client):
    gateway.engine.script_all("Hello!")
    events = await collect(await client.responses.create(model="tiny", input="Hi", stream=True))
    assert without_repeats([event.type for event in events]) == TEXT_EVENTS
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == "Hello!"
    final = events[-1].response
    assert final.output_text == "Hello!"
    assert {event.item_id for event in deltas} == {final.output[0].id}
    assert events[0].response.status == "in_progress"
    assert events[0].response.id == final.id


async def test_the_accumulating_stream_helper(gateway, client):
    gateway.engine.script_all(CALL)
    async with client.responses.stream(model="tiny", input="Rain?", tools=[WEATHER]) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    [message, call] = final.output
    assert message.content[0].text == "I look."
    assert (call.type, call.name, call.arguments) == (
        "function_call",
        "weather",
        '{"city": "Paris"}',
    )


async def test_a_conversation_with_a_tool_goes_on_by_its_id(gateway, client):
    gateway.engine.script_all(CALL)
    first = await client.responses.create(model="tiny", input="Rain?", tools=[WEATHER])
    call = first.output[1]
    gateway.engine.script_all("No rain.")
    second = await client.responses.create(
        model="tiny",
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sun"}],
        tools=[WEATHER],
    )
    assert second.output_text == "No rain."
    assert second.previous_response_id == first.id
    text = prompt_text(gateway)
    assert "user\nRain?<|im_end|>" in text
    assert 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}' in text
    assert "<tool_response>\nsun\n</tool_response>" in text


async def test_a_streamed_response_can_be_gone_on_with_as_soon_as_it_is_complete(gateway, client):
    gateway.engine.script_all("Hello!")
    stream = await client.responses.create(model="tiny", input="Hi", stream=True)
    async for event in stream:
        if event.type == "response.completed":
            await client.responses.create(
                model="tiny", input="More", previous_response_id=event.response.id
            )
    assert "assistant\nHello!<|im_end|>\n<|im_start|>user\nMore" in prompt_text(gateway)


async def test_thoughts_are_an_item_of_their_own(start_gateway, client_of):
    gateway = await start_gateway(chat_template=ThinkingTemplate())
    gateway.engine.script_all("<think>Hm.</think>Yes.")
    stream = await client_of(gateway).responses.create(model="tiny", input="Hi", stream=True)
    events = await collect(stream)
    thoughts = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    assert "".join(thoughts) == "Hm."
    [reasoning, message] = events[-1].response.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Hm.")
    assert message.content[0].text == "Yes."


async def test_a_response_that_is_cut_is_incomplete(client):
    response = await client.responses.create(model="tiny", input="Hi", max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"


async def test_a_response_is_kept_until_it_is_deleted(client):
    response = await client.responses.create(model="tiny", input="Hi", max_output_tokens=3)
    assert await client.responses.retrieve(response.id) == response
    await client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)


async def test_what_is_not_stored_is_not_there(client):
    response = await client.responses.create(
        model="tiny", input="Hi", max_output_tokens=3, store=False
    )
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="tiny", input="x", previous_response_id=response.id)
    assert caught.value.code == "previous_response_not_found"


async def test_nobody_else_sees_a_response(gateway, client_of):
    mine, theirs = client_of(gateway, "mine"), client_of(gateway, "theirs")
    response = await mine.responses.create(model="tiny", input="Hi", max_output_tokens=3)
    for attempt in (
        theirs.responses.retrieve(response.id),
        theirs.responses.delete(response.id),
        theirs.responses.cancel(response.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await attempt
    with pytest.raises(openai.BadRequestError):
        await theirs.responses.create(model="tiny", input="x", previous_response_id=response.id)
    await mine.responses.retrieve(response.id)


async def test_a_response_in_the_background_is_looked_at_until_it_ends(gateway, client):
    gateway.engine.script_all("Hello!")
    gateway.engine.hold()
    response = await client.responses.create(model="tiny", input="Hi", background=True)
    assert (response.status, response.background) == ("in_progress", True)
    assert (await client.responses.retrieve(response.id)).status == "in_progress"
    gateway.engine.release()
    stream = await client.responses.retrieve(response.id, stream=True)
    events = await collect(stream)
    assert events[-1].type == "response.completed"
    assert (await client.responses.retrieve(response.id)).output_text == "Hello!"


async def test_a_stream_that_was_left_goes_on_and_is_resumed_where_it_was(gateway, client):
    gateway.engine.script_all("Hello, world!")
    gateway.engine.hold()
    stream = await client.responses.create(model="tiny", input="Hi", background=True, stream=True)
    gateway.engine.step(5)
    seen = []
    async for event in stream:
        seen.append(event)
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    gateway.engine.release()
    rest = await client.responses.retrieve(
        seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number
    )
    events = [*seen, *[event async for event in rest]]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text == "Hello, world!"
    assert gateway.engine.num_aborts == 0


async def test_a_response_in_the_background_can_be_cancelled(gateway, client):
    gateway.engine.hold()
    stream = await client.responses.create(model="tiny", input="Hi", background=True, stream=True)
    gateway.engine.step(3)
    first = await anext(stream)
    cancelled = await client.responses.cancel(first.response.id)
    assert cancelled.status == "cancelled"
    assert await client.responses.cancel(first.response.id) == cancelled
    kinds = [event.type async for event in stream]
    assert kinds[-1] == "response.cancelled"
    assert gateway.engine.num_active == 0


async def test_leaving_a_response_in_the_foreground_aborts_it(gateway, client):
    gateway.engine.hold()
    stream = await client.responses.create(model="tiny", input="Hi", stream=True)
    gateway.engine.step()
    await anext(stream)
    await stream.close()
    await gateway.engine.wait_until_idle()
    assert gateway.engine.num_aborts == 1


async def test_a_failure_in_mid_stream_is_told(gateway, client):
    gateway.engine.hold()
    stream = await client.responses.create(model="tiny", input="Hi", stream=True)
    gateway.engine.step()
    seen = [await anext(stream) for _ in range(5)]
    gateway.engine.fail_requests()
    events = seen + [event async for event in stream]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error"
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(events[0].response.id)


async def test_a_failure_of_a_whole_response_is_an_error(gateway, client):
    gateway.engine.hold()
    task = asyncio.create_task(client.responses.create(model="tiny", input="Hi"))
    await gateway.engine.wait_for_requests(1)
    gateway.engine.fail_requests()
    with pytest.raises(openai.InternalServerError):
        await task


async def test_each_refusal_is_the_error_class_that_it_should_be(start_gateway, client_of):
    gateway = await start_gateway(FakeEngine(max_model_len=40, max_num_queued_requests=0))
    responses = client_of(gateway).responses
    with pytest.raises(openai.NotFoundError):
        await responses.create(model="other", input="Hi")
    for fields in ({}, {"stream": True}, {"background": True}):
        with pytest.raises(openai.RateLimitError):
            await responses.create(model="tiny", input="Hi", **fields)


def test_the_synchronous_client_does_the_same(tiny_server):
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none") as client:
        options = {"input": "Hi", "max_output_tokens": 4, "temperature": 0}
        whole = client.responses.create(model="tiny", **options)
        with client.responses.stream(model="tiny", **options) as stream:
            events = list(stream)
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.output[0].content[0].text == whole.output_text
        again = client.responses.create(model="tiny", previous_response_id=whole.id, **options)
        assert again.usage.input_tokens > whole.usage.input_tokens


async def test_what_was_asked_is_listed_page_by_page(client):
    asked = [{"role": "user", "content": f"Question {i}"} for i in range(5)]
    response = await client.responses.create(model="tiny", input=asked, max_output_tokens=1)
    pages = client.responses.input_items.list(response.id, limit=2, order="asc")
    assert [item.content[0].text async for item in pages] == [m["content"] for m in asked]
