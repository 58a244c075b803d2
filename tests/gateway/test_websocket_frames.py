"""Frames that are no messages, messages that start no stream, pings."""

import msgpack
import orjson
import pytest
from aiohttp import WSMsgType

from fakes import FakeEngine
from gateway.websocket import MAX_BAD_FRAMES
from stream_app import serve_streams, start

both_encodings = pytest.mark.parametrize("encoding", ["json", "msgpack"])

# FakeEngine answers "Hi!" (3 bytes) with the letters from chr(ord("a") + 3) on.
ANSWER = "defg"


# ---- frames that are no messages ---------------------------------------------------------------

BAD_JSON = [b"", b"{", b"[]", b"3", b'"x"', b"nul", b"\xff\xfe", b'{"a":1e999}', b"[" * 20000]
BAD_MSGPACK = [
    b"",
    b"\xc1",
    b"\x90",
    msgpack.packb({1: 2}),
    msgpack.packb({"type": msgpack.ExtType(4, b"x")}),
    b"\x81" * 3000,
    b"\xdf\xff\xff\xff\xff",
    msgpack.packb({"type": "ping", "t": 1}) + b"\x01",
    b"\x81\xa4type\xa3\xed\xa0\x80",  # a lone surrogate
]


@pytest.mark.parametrize(
    ("encoding", "frame"),
    [("json", f) for f in BAD_JSON] + [("msgpack", f) for f in BAD_MSGPACK],
)
async def test_a_frame_that_cannot_be_decoded_gets_an_error_and_nothing_else_happens(
    encoding, frame
):
    async with serve_streams() as gateway, gateway.connect(encoding) as stream:
        await stream.send_raw(frame)
        error = await stream.receive()
        await stream.send(start("a"))
        assert (await stream.answer("a"))[0] == ANSWER
    assert "id" not in error
    assert (error["status"], error["error"]["code"]) == (400, "invalid_frame")


async def test_a_lone_surrogate_in_json_is_refused():
    async with serve_streams() as gateway, gateway.connect() as stream:
        await stream.send_raw(b'{"type":"start","id":"a","request":{"prompt":"\\ud800"}}')
        assert (await stream.receive())["error"]["code"] == "invalid_frame"


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ({}, "type", "unknown_type"),
        ({"type": 3}, "type", "unknown_type"),
        ({"type": "credits", "id": "a", "n": 3}, "type", "unknown_type"),
        ({"type": "credit", "id": "a", "n": 0}, "n", "invalid_message"),
        ({"type": "credit", "n": 1}, "id", "invalid_message"),
        ({"type": "resume", "token": "t"}, "id", "invalid_message"),
        ({"type": "start", "request": {"prompt": "x"}}, "id", "invalid_message"),
        ({"type": "start", "id": "", "request": {"prompt": "x"}}, "id", "invalid_message"),
        ({"type": "start", "id": "a b", "request": {"prompt": "x"}}, "id", "invalid_message"),
        ({"type": "start", "id": "a\n", "request": {"prompt": "x"}}, "id", "invalid_message"),
        ({"type": "start", "id": "x" * 129, "request": {"prompt": "x"}}, "id", "invalid_message"),
        ({"type": "cancel"}, "id", "invalid_message"),
        ({"type": "cancel", "id": "nobody"}, "id", "unknown_id"),
        ({"type": "ping"}, "t", "invalid_message"),
        ({"type": "ping", "t": "now"}, "t", "invalid_message"),
        ({"type": "ping", "t": -1}, "t", "invalid_message"),
    ],
)
@both_encodings
async def test_a_message_that_starts_no_stream_gets_an_error_without_id(
    encoding, message, param, code
):
    async with serve_streams() as gateway, gateway.connect(encoding) as stream:
        await stream.send(message)
        error = await stream.receive()
    assert "id" not in error
    assert (error["error"]["param"], error["error"]["code"]) == (param, code)


async def test_unknown_fields_are_ignored():
    async with serve_streams() as gateway, gateway.connect() as stream:
        await stream.send({**start("a", new_option={"deep": [1]}), "credits": 64})
        assert (await stream.answer("a"))[0] == ANSWER


async def test_the_wrong_kind_of_frame_is_an_error():
    async with serve_streams() as gateway, gateway.connect("json") as stream:
        await stream.ws.send_frame(orjson.dumps(start("a")), WSMsgType.BINARY)
        error = await stream.receive()
    assert error["error"]["code"] == "invalid_frame"
    assert "text frames" in error["error"]["message"]


async def test_frames_that_stay_undecodable_close_the_connection_with_1007():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway, gateway.connect() as stream:
        await stream.send(start("a"))
        await stream.receive()
        for _ in range(MAX_BAD_FRAMES - 1):
            await stream.send_raw(b"{")
        await stream.send({"type": "ping", "t": 1})  # in between, a good one: counted anew
        for _ in range(MAX_BAD_FRAMES):
            await stream.send_raw(b"{")
        messages = [await stream.receive() for _ in range(2 * MAX_BAD_FRAMES)]
        assert sum(m["type"] == "error" for m in messages) == 2 * MAX_BAD_FRAMES - 1
        assert await stream.receive_close() == 1007
        await engine.wait_until_idle()


async def test_a_message_that_is_too_large_closes_the_connection_with_1009():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine, max_body_bytes=4096) as gateway, gateway.connect() as stream:
        await stream.send(start("a"))
        await stream.receive()
        await stream.send(start("b", "x" * 5000))
        assert await stream.receive_close() == 1009
        await engine.wait_until_idle()


@both_encodings
async def test_a_ping_is_answered_with_the_same_number(encoding):
    async with serve_streams() as gateway, gateway.connect(encoding) as stream:
        for t in (0, 7, 1767225600.25):
            await stream.send({"type": "ping", "t": t})
            assert await stream.receive() == {"type": "pong", "t": t}


async def test_a_websocket_ping_is_answered_with_its_payload():
    async with serve_streams() as gateway, gateway.connect(autoping=False) as stream:
        await stream.ws.ping(b"hello")
        frame = await stream.ws.receive()
    assert (frame.type, bytes(frame.data)) == (WSMsgType.PONG, b"hello")


async def test_a_client_that_says_too_much_waits_and_nobody_else(monkeypatch):
    monkeypatch.setattr("gateway.connections.BURST_S", 2 * 3600.0)
    async with (
        serve_streams(ws_max_messages_per_s=1 / 3600) as gateway,
        gateway.connect() as chatty,
        gateway.connect() as other,
    ):
        for t in (1, 2):  # the burst
            await chatty.send({"type": "ping", "t": t})
            assert (await chatty.receive())["t"] == t
        await chatty.send(start("a"))
        await other.send(start("b", "other"))
        await other.answer("b")
        assert len(gateway.engine.submitted) == 1
        # It would wait for an hour to be told of a close.
        chatty.ws._response.connection.transport.abort()
