"""The wire; tests/integration/test_openai_responses_websocket.py is about the real client."""

import asyncio

import orjson
import pytest
from aiohttp import ClientWSTimeout, WSMsgType, WSServerHandshakeError

from fakes import FakeEngine
from gateway.connections import MessageRate
from gateway.openai.responses.service import RESPONSES
from stream_app import until

CREATE = {"type": "response.create", "input": "Hi"}


async def receive(ws):
    frame = await ws.receive()
    assert frame.type is WSMsgType.TEXT, frame
    return orjson.loads(frame.data)


async def last_of(ws, stream_id=None):
    """The last event of one lane."""
    while True:
        event = await receive(ws)
        is_last = event["type"].rpartition(".")[2] in ("completed", "incomplete", "failed", "error")
        if is_last and event.get("stream_id") == stream_id:
            return event


def connect(gateway):
    return gateway.session.ws_connect("/v1/responses", timeout=ClientWSTimeout(ws_close=1))


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({}, "type"),
        ({"type": "response.steer", "input": "x"}, "type"),
        ({**CREATE, "stream_id": 5}, "stream_id"),
        ({**CREATE, "stream_id": ""}, "stream_id"),
        ({**CREATE, "stream_id": "x" * 200}, "stream_id"),
        ({**CREATE, "input": 5}, "input"),
        ({**CREATE, "tools": "x"}, "tools"),
        ({**CREATE, "temperature": -1}, "temperature"),
    ],
)
async def test_a_bad_message_is_an_error_that_names_the_field(gateway, message, param):
    async with connect(gateway) as ws:
        await ws.send_json(message)
        error = await receive(ws)
        assert (error["type"], error["status"], error["error"]["param"]) == ("error", 400, param)
        await ws.send_json({**CREATE, "max_output_tokens": 1})
        assert (await last_of(ws))["type"] == "response.incomplete"


async def test_the_lane_of_a_bad_message_is_told(gateway):
    async with connect(gateway) as ws:
        await ws.send_json({"type": "x", "stream_id": "a"})
        assert (await receive(ws))["stream_id"] == "a"


async def test_what_only_http_has_is_ignored(gateway):
    fields = {"background": True, "stream": False, "stream_options": {"include_obfuscation": False}}
    async with connect(gateway) as ws:
        await ws.send_json({**CREATE, **fields, "max_output_tokens": 1})
        assert (await last_of(ws))["response"]["background"] is False


async def test_too_many_frames_that_cannot_be_decoded_end_the_connection(gateway):
    async with connect(gateway) as ws:
        for _ in range(4):
            await ws.send_str("{")
            await ws.send_bytes(b"{}")
        for _ in range(8):
            assert (await receive(ws))["status"] == 400
        assert (await ws.receive()).type is WSMsgType.CLOSE
        assert ws.close_code == 1007


async def test_a_connection_has_only_so_many_open_requests(start_gateway):
    gateway = await start_gateway(ws_max_streams=2)
    gateway.engine.hold()
    async with connect(gateway) as ws:
        for stream_id in ("a", "a", "b"):
            await ws.send_json({**CREATE, "stream_id": stream_id, "max_output_tokens": 1})
        error = await last_of(ws, "b")
        assert (error["type"], error["status"]) == ("error", 429)
        gateway.engine.release()
        for _ in range(2):
            assert (await last_of(ws, "a"))["type"] == "response.incomplete"
        await ws.send_json({**CREATE, "stream_id": "b", "max_output_tokens": 1})
        assert (await last_of(ws, "b"))["type"] == "response.incomplete"


async def test_open_requests_have_only_so_many_bytes(start_gateway):
    gateway = await start_gateway(max_body_bytes=2000)
    gateway.engine.hold()
    async with connect(gateway) as ws:
        for stream_id in ("a", "b"):
            await ws.send_json({**CREATE, "stream_id": stream_id, "user": "x" * 1500})
        error = await last_of(ws, "b")
        assert (error["status"], error["error"]["type"]) == (429, "rate_limit_error")


async def test_a_ping_is_answered_while_answers_are_sent(gateway):
    gateway.engine.hold()
    ws = await gateway.session.ws_connect("/v1/responses", autoping=False)
    await ws.send_json({**CREATE, "max_output_tokens": 1})
    await ws.ping(b"x")
    while (frame := await ws.receive()).type is WSMsgType.TEXT:
        pass
    assert (frame.type, frame.data) == (WSMsgType.PONG, b"x")
    await ws.close()


async def test_a_client_that_leaves_ends_all_that_it_asked_for(gateway):
    gateway.engine.hold()
    async with connect(gateway) as ws:
        for stream_id in ("a", "b", "b"):
            await ws.send_json({**CREATE, "stream_id": stream_id})
        await gateway.engine.wait_for_requests(2)
    await gateway.engine.wait_until_idle()
    assert gateway.engine.num_aborts == 2
    assert len(gateway.engine.submitted) == 2  # the third was never begun


async def test_a_client_that_does_not_read_is_closed_and_its_requests_end(start_gateway):
    gateway = await start_gateway(
        FakeEngine(max_model_len=1 << 20), send_timeout_s=0.1, ws_close_timeout_s=0.1
    )
    async with connect(gateway) as ws:
        for number in range(20):
            await ws.send_json({**CREATE, "stream_id": str(number), "ignore_eos": True})
        await gateway.engine.wait_for_requests(20)
        await gateway.engine.wait_until_idle()
        ws._response.connection.transport.abort()  # or else closing waits for what nobody reads
    assert gateway.engine.num_aborts > 0


async def test_an_idle_connection_closes_when_the_server_drains(gateway):
    async with connect(gateway) as ws:
        await ws.send_json({**CREATE, "max_output_tokens": 1})
        await last_of(ws)
        stopping = asyncio.create_task(gateway.server.stop())
        assert (await ws.receive()).type is WSMsgType.CLOSE
        assert ws.close_code == 1012
    await stopping


async def test_what_runs_finishes_when_the_server_drains_and_nothing_new_begins(gateway):
    gateway.engine.script_all("Hello")
    gateway.engine.hold()
    async with connect(gateway) as ws:
        await ws.send_json(CREATE)
        await gateway.engine.wait_for_requests(1)
        stopping = asyncio.create_task(gateway.server.stop(drain_timeout_s=30))
        await gateway.engine.wait_until(lambda: not gateway.engine.is_ready)
        await ws.send_json({**CREATE, "stream_id": "new"})
        assert (await last_of(ws, "new"))["status"] == 503
        gateway.engine.release()
        assert (await last_of(ws))["type"] == "response.completed"
        assert (await ws.receive()).type is WSMsgType.CLOSE
        assert ws.close_code == 1012
    await stopping


async def test_what_does_not_finish_in_time_is_told(gateway):
    gateway.engine.hold()
    async with connect(gateway) as ws:
        await ws.send_json({**CREATE, "stream_id": "a"})
        await gateway.engine.wait_for_requests(1)
        stopping = asyncio.create_task(gateway.server.stop(drain_timeout_s=0))
        last = await last_of(ws, "a")
        assert last["type"] in ("response.failed", "error")
        while (await ws.receive()).type is WSMsgType.TEXT:
            pass
        assert ws.close_code == 1012
    await stopping


async def test_without_an_upgrade_it_says_what_it_is(gateway):
    status, answer = await gateway.get("/v1/responses")
    assert (status, answer["error"]["code"]) == (400, "upgrade_required")


async def test_there_is_room_for_only_so_many_connections(start_gateway):
    gateway = await start_gateway(ws_max_connections=1)
    async with connect(gateway):
        with pytest.raises(WSServerHandshakeError) as caught:
            await connect(gateway)
        assert caught.value.status == 503


async def test_a_page_of_another_site_is_refused(gateway):
    with pytest.raises(WSServerHandshakeError) as caught:
        await gateway.session.ws_connect(
            "/v1/responses", headers={"Origin": "https://evil.example"}
        )
    assert caught.value.status == 403


async def test_open_requests_of_an_account_have_only_so_many_bytes_over_all_connections(
    gateway, monkeypatch
):
    monkeypatch.setattr("gateway.openai.responses.service.MAX_HELD_BYTES", 2000)
    gateway.engine.hold()
    long = {**CREATE, "user": "x" * 1500, "max_output_tokens": 1}
    async with connect(gateway) as other:
        async with connect(gateway) as ws:
            await ws.send_json(long)
            await ws.send_json({**CREATE, "stream_id": "next"})
            await gateway.engine.wait_for_requests(2)
            await other.send_json(long)
            error = await last_of(other)
            assert (error["type"], error["status"]) == ("error", 429)
        await gateway.engine.wait_until_idle()
        held = gateway.server._runner.app[RESPONSES]._num_held
        await until(lambda: not held)
        gateway.engine.release()
        await other.send_json(long)
        assert (await last_of(other))["type"] == "response.incomplete"
        await until(lambda: not held)


async def test_its_messages_are_read_no_faster_than_those_of_any_websocket(gateway, monkeypatch):
    waited = []

    async def wait(self):
        waited.append(self)

    monkeypatch.setattr(MessageRate, "wait", wait)
    async with connect(gateway) as ws:
        for _ in range(2):
            await ws.send_str("{")
            assert (await receive(ws))["status"] == 400
        assert len(waited) == 2
