"""The stream protocol as server-sent events."""

import asyncio
import contextlib

import orjson
import pytest

from fakes import FakeEngine
from gateway.resumption import RESUME_STORE
from stream_app import serve_streams, until

PATH = "/v1/stream/events"
# FakeEngine answers "Hi!" (3 bytes) with the letters from chr(ord("a") + 3) on.
ANSWER = "defghijklmno"


def body(*, resumable: bool = True, **request):
    return {
        "request": {"prompt": "Hi!", "max_tokens": len(ANSWER), **request},
        "stream": {"resumable": resumable},
    }


async def next_event(response) -> tuple[str, str | None, dict]:
    """Read one event: its name, its id, its data."""
    fields = {}
    while (line := (await response.content.readline()).decode()) != "\n":
        assert line.endswith("\n"), f"the stream ended in the middle: {line!r}"
        name, _, value = line.rstrip("\n").partition(": ")
        if name:
            assert name not in fields
            fields[name] = value
    data = orjson.loads(fields["data"])
    assert data["type"] == fields["event"]
    return fields["event"], fields.get("id"), data


async def read_text(response) -> tuple[str, dict]:
    """Read to the end; return the text and the last message."""
    text = ""
    while True:
        name, _, data = await next_event(response)
        if name == "delta":
            text += data["text"]
        elif name in ("done", "error"):
            assert await response.read() == b""
            return text, data


@contextlib.asynccontextmanager
async def resumed(gateway, token: str, last_id: str | None = None, **headers):
    headers = {"Resume-Token": token, **headers}
    if last_id is not None:
        headers["Last-Event-ID"] = last_id
    async with gateway.client.get(PATH, headers=headers) as response:
        yield response


@pytest.mark.parametrize("resumable", [True, False])
async def test_a_stream_has_the_messages_of_the_protocol_and_deltas_have_their_seq_as_id(resumable):
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway:
        asking = asyncio.create_task(gateway.client.post(PATH, json=body(resumable=resumable)))
        async with await asking as response:
            assert response.content_type == "text/event-stream"
            name, event_id, accepted = await next_event(response)
            assert (name, event_id) == ("accepted", None)
            assert ("resume_token" in accepted) == resumable
            for number in range(3):
                engine.step()
                name, event_id, delta = await next_event(response)
                assert (name, event_id, delta["seq"]) == ("delta", str(number), number)
                assert delta["text"] == ANSWER[number]
            engine.release()
            text, done = await read_text(response)
    assert text == ANSWER[3:]
    assert done["finish_reason"] == "length"


async def test_a_client_that_lost_its_connection_goes_on_after_the_last_event():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway:
        async with gateway.client.post(PATH, json=body()) as response:
            token = (await next_event(response))[2]["resume_token"]
            engine.step(2)
            _, last_id, delta = await next_event(response)
            response.connection.transport.abort()
        await until(lambda: gateway.app[RESUME_STORE].num_waiting == 1)
        engine.step(3)
        async with resumed(gateway, token, last_id) as response:
            assert (await next_event(response))[0] == "resumed"
            engine.release()
            text, _ = await read_text(response)
        assert delta["text"] + text == ANSWER
        async with resumed(gateway, token) as response:  # and once more from the beginning
            assert (await read_text(response))[0] == ANSWER


async def test_a_stream_moves_between_events_and_a_websocket():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway, gateway.connect() as stream:
        async with gateway.client.post(PATH, json=body()) as response:
            token = (await next_event(response))[2]["resume_token"]
            engine.step()
            await next_event(response)
            await stream.send({"type": "resume", "id": "mine", "token": token, "after": 0})
            assert (await stream.receive())["type"] == "resumed"
            _, error = await read_text(response)
            assert (error["status"], error["error"]["code"]) == (409, "resumed_elsewhere")
        engine.release()
        assert (await stream.answer("mine"))[0] == ANSWER[1:]


async def test_what_is_not_resumable_ends_with_its_connection():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway:
        async with gateway.client.post(PATH, json=body(resumable=False)) as response:
            await next_event(response)
            response.connection.transport.abort()
        await engine.wait_until_idle()
        assert engine.num_aborts == 1


async def test_a_stream_can_be_cancelled_by_its_token():
    engine = FakeEngine()
    engine.hold()
    async with (
        serve_streams(engine) as gateway,
        gateway.client.post(PATH, json=body()) as response,
    ):
        token = (await next_event(response))[2]["resume_token"]
        engine.step(2)
        async with gateway.client.delete(PATH, headers={"Resume-Token": token}) as answer:
            assert answer.status == 204
        text, done = await read_text(response)
    assert (text, done["finish_reason"]) == ("de", "cancelled")
    assert done["usage"]["completion_tokens"] == 2


async def test_silence_is_broken_by_comments():
    engine = FakeEngine()
    engine.hold()
    async with (
        serve_streams(engine, sse_keep_alive_interval_s=0.01) as gateway,
        gateway.client.post(PATH, json=body()) as response,
    ):
        await next_event(response)
        assert await response.content.readline() == b": keep-alive\n"
        await response.content.readline()
        engine.release()
        while (line := await response.content.readline()).startswith((b":", b"\n")):
            pass
        assert line.startswith(b"event: delta")


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"request": {}}, 400, "prompt"),
        ({"request": {"prompt": "x", "temperature": -1}}, 400, "temperature"),
        ({"request": {"prompt": "x", "temperature": "hot"}}, 400, "temperature"),
        ({"request": {"prompt": "x", "stop": [1]}}, 400, "stop[0]"),
        ({"request": 5}, 400, "request"),
        ({"request": {"prompt": "x"}, "stream": {"resumable": 5}}, 400, "stream.resumable"),
        ({"request": {"prompt": "x", "model": "other"}}, 404, "model"),
        ({"request": {"prompt": "x"}, "stream": {"credits": 3}}, 400, "stream.credits"),
        ({}, 400, "request"),
    ],
)
async def test_a_refusal_is_an_http_status(fields, status, param):
    async with serve_streams() as gateway, gateway.client.post(PATH, json=fields) as response:
        assert response.status == status
        assert (await response.json())["error"]["param"] == param
        assert gateway.app[RESUME_STORE].num_streams == 0


@pytest.mark.parametrize(
    ("headers", "status", "param"),
    [
        ({}, 400, "Resume-Token"),
        ({"Resume-Token": "x"}, 404, "token"),
        ({"Resume-Token": "x", "Last-Event-ID": "-1"}, 400, "Last-Event-ID"),
        ({"Resume-Token": "x", "Last-Event-ID": "9" * 30}, 400, "Last-Event-ID"),
    ],
)
async def test_a_resume_that_cannot_be_is_an_http_status(headers, status, param):
    async with serve_streams() as gateway, gateway.client.get(PATH, headers=headers) as response:
        assert response.status == status
        assert (await response.json())["error"]["param"] == param


async def test_a_gap_is_410_and_somebody_elses_token_is_404():
    engine = FakeEngine()
    async with serve_streams(engine) as gateway:
        async with gateway.client.post(PATH, json=body()) as response:
            token = (await next_event(response))[2]["resume_token"]
            await read_text(response)
        async with resumed(gateway, token, "99") as response:
            assert response.status == 410
        async with resumed(gateway, token, Authorization="Bearer other") as response:
            assert response.status == 404


async def test_a_field_of_the_wrong_type_is_named_as_the_client_spells_it():
    fields = {"request": {"prompt": "x", "temperature": "hot"}}
    async with serve_streams() as gateway, gateway.client.post(PATH, json=fields) as response:
        error = (await response.json())["error"]
    assert error["message"].startswith("temperature: ")
