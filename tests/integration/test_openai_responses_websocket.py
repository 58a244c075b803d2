"""Responses over one websocket, by the stock `openai` package's `responses.connect()`."""

import asyncio

import openai
import pytest
from openai.types.responses import responses_server_event

from fakes import FakeEngine

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


@pytest.fixture
async def client_of():
    clients = []

    def make(gateway):
        client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
        clients.append(client)
        return client

    yield make
    for client in clients:
        await client.close()


@pytest.fixture
def client(gateway, client_of):
    return client_of(gateway)


async def events_until_end(connection, stream_id=None):
    """Events of one lane, up to its last."""
    events = []
    async for event in connection:
        if event.stream_id == stream_id:
            events.append(event)
            if event.type.rpartition(".")[2] in ("completed", "incomplete", "failed", "error"):
                return events
    raise AssertionError("the connection ended")


def text_of(events):
    return "".join(e.delta for e in events if e.type == "response.output_text.delta")


async def test_a_response_has_all_its_events(gateway, client):
    gateway.engine.script_all("Hello!")
    async with client.responses.connect() as connection:
        await connection.response.create(model="tiny", input="Hi")
        events = await events_until_end(connection)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert isinstance(events[0], responses_server_event.ResponseWsCreated)
    assert isinstance(events[-1], responses_server_event.ResponseWsCompleted)
    assert text_of(events) == events[-1].response.output_text == "Hello!"


async def test_two_lanes_run_side_by_side_and_every_event_says_which(gateway, client):
    gateway.engine.hold()
    async with client.responses.connect() as connection:
        for stream_id in ("a", "b"):
            await connection.response.create(
                model="tiny", input="Hi", stream_id=stream_id, max_output_tokens=4
            )
        await gateway.engine.wait_for_requests(2)  # none waits for the other
        gateway.engine.release()
        events = {"a": [], "b": []}
        async for event in connection:
            events[event.stream_id].append(event)
            if all(lane and lane[-1].type == "response.incomplete" for lane in events.values()):
                break
    for lane in events.values():
        assert [event.sequence_number for event in lane] == list(range(len(lane)))
        assert len(text_of(lane)) == 4


async def test_a_lane_answers_in_the_order_in_which_it_was_asked(gateway, client):
    gateway.engine.hold()
    async with client.responses.connect() as connection:
        for number in range(3):
            await connection.response.create(
                model="tiny", input="x" * (number + 1), stream_id="a", max_output_tokens=2
            )
        await gateway.engine.wait_for_requests(1)
        assert gateway.engine.num_active == 1
        gateway.engine.release()
        ids = []
        for _ in range(3):
            events = await events_until_end(connection, "a")
            ids.append(events[-1].response.id)
    assert len(set(ids)) == 3
    lengths = [len(prompt) for prompt, _ in gateway.engine.submitted]
    assert lengths == sorted(lengths)


async def test_a_turn_goes_on_with_the_one_before_though_it_is_not_stored(gateway, client):
    gateway.engine.script_all(CALL)
    async with client.responses.connect() as connection:
        await connection.response.create(model="tiny", input="Rain?", tools=[WEATHER], store=False)
        first = (await events_until_end(connection))[-1].response
        [call] = first.output
        gateway.engine.script_all("No rain.")
        await connection.response.create(
            model="tiny",
            previous_response_id=first.id,
            input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sun"}],
            tools=[WEATHER],
            store=False,
        )
        events = await events_until_end(connection)
    assert text_of(events) == "No rain."
    ids, _ = gateway.engine.submitted[-1]
    assert "sun" in gateway.tokenizer.decode(ids)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)


async def test_a_stored_response_is_there_for_http_as_well(gateway, client):
    gateway.engine.script_all("Hello!")
    async with client.responses.connect() as connection:
        await connection.response.create(model="tiny", input="Hi")
        response = (await events_until_end(connection))[-1].response
    assert (await client.responses.retrieve(response.id)).output_text == "Hello!"


async def test_a_prompt_can_be_warmed_up(gateway, client):
    async with client.responses.connect() as connection:
        await connection.response.create(model="tiny", input="Hi", generate=False)
        warm = (await events_until_end(connection))[-1]
        assert (warm.type, warm.response.output) == ("response.completed", [])
        await connection.response.create(
            model="tiny", input="More", previous_response_id=warm.response.id, max_output_tokens=1
        )
        await events_until_end(connection)
    ids, _ = gateway.engine.submitted[-1]
    assert "user\nHi<|im_end|>\n<|im_start|>user\nMore" in gateway.tokenizer.decode(
        ids, skip_special=False
    )


async def test_errors_are_events_of_their_lane_and_the_connection_goes_on(start_gateway, client_of):
    gateway = await start_gateway(FakeEngine(max_num_queued_requests=1))
    async with client_of(gateway).responses.connect() as connection:
        await connection.response.create(model="other", input="Hi", stream_id="a")
        [error] = await events_until_end(connection, "a")
        assert (error.status, error.error.code, error.error.param) == (
            404,
            "model_not_found",
            "model",
        )
        await connection.response.create(model="tiny", input="x", previous_response_id="resp_1")
        [error] = await events_until_end(connection)
        assert (error.status, error.error.code) == (400, "previous_response_not_found")
        gateway.engine.refuse("queue_full", retry_after_s=3)
        await connection.response.create(model="tiny", input="Hi")
        [error] = await events_until_end(connection)
        assert (error.status, error.error.headers) == (429, {"Retry-After": "3"})


async def test_leaving_aborts_all_lanes(gateway, client):
    gateway.engine.hold()
    async with client.responses.connect() as connection:
        for stream_id in "ab":
            await connection.response.create(model="tiny", input="Hi", stream_id=stream_id)
        await gateway.engine.wait_for_requests(2)
    await gateway.engine.wait_until_idle()
    assert gateway.engine.num_aborts == 2


async def test_handlers_of_the_client_get_what_they_asked_for(gateway, client):
    gateway.engine.script_all("Hello!")
    texts = []
    async with client.responses.connect() as connection:
        connection.on("response.output_text.delta", lambda event: texts.append(event.delta))
        done = asyncio.get_running_loop().create_future()
        connection.on("response.completed", lambda event: done.set_result(event))
        dispatching = asyncio.create_task(connection.dispatch_events())
        await connection.response.create(model="tiny", input="Hi")
        await done
        dispatching.cancel()
    assert "".join(texts) == "Hello!"


def test_the_synchronous_client_does_the_same(tiny_server):
    with (
        openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none") as client,
        client.responses.connect() as connection,
    ):
        connection.response.create(model="tiny", input="Hi", max_output_tokens=4, temperature=0)
        text = ""
        for event in connection:
            if event.type == "response.output_text.delta":
                text += event.delta
            if event.type in ("response.completed", "response.incomplete"):
                break
        whole = client.responses.create(
            model="tiny", input="Hi", max_output_tokens=4, temperature=0
        )
    assert text == whole.output_text
