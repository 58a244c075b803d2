import asyncio
import json
import socket

import pytest

from connections import closed, connection, posted
from fakes import FakeEngine


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 4])
async def test_a_client_that_leaves_while_it_runs_frees_the_engine(gateway, stream, n):
    gateway.engine.hold()
    async with posted(gateway.server.port, {"prompt": "x", "stream": stream, "n": n}):
        await gateway.engine.wait_for_requests(n)
        gateway.engine.step(3)
    await gateway.engine.wait_until_idle()
    assert gateway.engine.num_aborts == n


async def test_a_client_that_leaves_while_it_waits_frees_its_place(start_gateway):
    gateway = await start_gateway(FakeEngine(max_num_seqs=1))
    gateway.engine.hold()
    async with posted(gateway.server.port, {"prompt": "x"}):
        await gateway.engine.wait_for_requests(1)
        gateway.engine.step()
        async with posted(gateway.server.port, {"prompt": "x"}):
            await gateway.engine.wait_for_requests(2)
            assert gateway.engine.num_waiting == 1
        await gateway.engine.wait_until(lambda: gateway.engine.num_waiting == 0)
        assert gateway.engine.num_active == 1
    await gateway.engine.wait_until_idle()


async def test_a_client_that_leaves_in_mid_stream_frees_the_engine(gateway):
    gateway.engine.hold()
    async with posted(gateway.server.port, {"prompt": "x", "stream": True}) as (reader, _):
        await gateway.engine.wait_for_requests(1)
        gateway.engine.step(3)
        await reader.readuntil(b"data: ")
    await gateway.engine.wait_until_idle()
    assert gateway.engine.num_aborts == 1


async def test_a_stop_lets_a_running_stream_finish(start_gateway):
    gateway = await start_gateway(shutdown_timeout_s=60)
    gateway.engine.hold()
    body = {"prompt": "x", "stream": True, "max_tokens": 3}
    async with posted(gateway.server.port, body) as (reader, _):
        await gateway.engine.wait_for_requests(1)
        stopping = asyncio.create_task(gateway.server.stop())
        await gateway.engine.wait_until(lambda: not gateway.engine.is_ready)
        assert (await gateway.get("/ready"))[0] == 503
        assert (await gateway.get("/health"))[0] == 200
        assert (await gateway.post("/v1/completions", {"prompt": "y"}))[0] == 503
        gateway.engine.step(3)
        text = (await reader.read()).decode()
    assert text.count('"finish_reason":"length"') == 1
    assert "data: [DONE]" in text
    await stopping


async def test_at_a_stop_a_websocket_hears_goaway_first_and_its_streams_finish(start_gateway):
    gateway = await start_gateway(shutdown_timeout_s=60)
    engine = gateway.engine
    engine.hold()
    ask = {"prompt": "Hi!", "max_tokens": 3}
    async with gateway.session.ws_connect("/v1/stream", protocols=["headrace.v1.json"]) as ws:
        assert (await ws.receive_json())["type"] == "hello"
        await ws.send_json({"type": "start", "id": "a", "request": ask})
        assert (await ws.receive_json())["type"] == "accepted"
        stopping = asyncio.create_task(gateway.server.stop())
        assert (await ws.receive_json())["type"] == "goaway"
        await ws.send_json({"type": "start", "id": "b", "request": ask})
        refused = await ws.receive_json()
        assert (refused["id"], refused["error"]["code"]) == ("b", "shutting_down")
        engine.step(3)
        assert (await ws.receive_json())["text"] == "def"
        assert (await ws.receive_json())["type"] == "done"
        assert (await ws.receive()).data == 1012  # and the answer to that, which the stop awaits
        await stopping


async def test_a_stop_ends_what_does_not_finish_in_time_with_an_error_event(start_gateway):
    gateway = await start_gateway()
    gateway.engine.hold()
    async with posted(gateway.server.port, {"prompt": "x", "stream": True}) as (reader, _):
        await gateway.engine.wait_for_requests(1)
        gateway.engine.step(2)
        await gateway.server.stop(drain_timeout_s=0)
        text = (await reader.read()).decode()
    assert '"code":"shutting_down"' in text
    assert "[DONE]" not in text


async def test_a_stop_answers_a_whole_answer_that_cannot_finish_with_503(start_gateway):
    gateway = await start_gateway()
    gateway.engine.hold()
    task = asyncio.create_task(gateway.post("/v1/completions", {"prompt": "x"}))
    await gateway.engine.wait_for_requests(1)
    await gateway.server.stop()
    status, body = await task
    assert (status, body["error"]["code"]) == (503, "shutting_down")


async def test_one_connection_too_many_is_told_to_come_back(start_gateway):
    gateway = await start_gateway(max_connections=1)
    assert (await gateway.get("/health"))[0] == 200  # keeps its connection
    async with connection(gateway.server.port) as (reader, _):
        answer = (await reader.read()).decode()
    assert answer.startswith("HTTP/1.1 503 ")
    assert json.loads(answer.split("\r\n\r\n")[1])["error"]["code"] == "too_many_connections"


async def test_a_burst_of_connections_is_held_to_the_bound(start_gateway):
    gateway = await start_gateway(max_connections=2)
    address = ("127.0.0.1", gateway.server.port)
    # The loop has no turn between them, so all are accepted before the first is served.
    sockets = [socket.create_connection(address) for _ in range(5)]
    pairs = [await asyncio.open_connection(sock=sock) for sock in sockets]
    for _, writer in pairs[:2]:
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    statuses = [(await reader.read()).split()[1] for reader, _ in pairs]
    for _, writer in pairs:
        await closed(writer)
    assert statuses == [b"200"] * 2 + [b"503"] * 3
    assert (await gateway.get("/health"))[0] == 200  # there is room again


async def test_a_connection_that_never_finishes_its_request_head_is_closed(start_gateway):
    gateway = await start_gateway(keepalive_timeout_s=0.05)
    async with connection(gateway.server.port) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: loc")
        assert await reader.read() == b""


@pytest.mark.parametrize(
    "data",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 10_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
async def test_broken_http_is_the_clients_fault_and_no_traceback_in_the_log(gateway, caplog, data):
    with caplog.at_level("DEBUG"):
        async with connection(gateway.server.port) as (reader, writer):
            writer.write(data)
            writer.write_eof()
            assert (await reader.read()).startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
    assert "a client sent broken HTTP: 400, message:" in caplog.text
    assert "Traceback" not in caplog.text
    assert {record.levelname for record in caplog.records if record.exc_info} == set()


async def test_a_port_that_is_taken_is_an_os_error(start_gateway):
    gateway = await start_gateway()
    with pytest.raises(OSError, match="address already in use"):
        await start_gateway(port=gateway.server.port)


async def test_the_url_is_one_that_a_browser_can_open(start_gateway):
    gateway = await start_gateway(host="0.0.0.0")
    assert gateway.server.url == f"http://127.0.0.1:{gateway.server.port}"


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 9000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: a\r\n" * 200 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",  # TLS where none is spoken
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    ],
    ids=["line", "field", "fields", "tls", "length"],
)
async def test_what_is_no_http_is_an_error_as_any_other_and_shows_nothing_of_ours(gateway, head):
    async with connection(gateway.server.port) as (reader, writer):
        writer.write(head)
        headers, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert headers.split()[1] == b"400"
    assert json.loads(body)["error"]["code"] == "bad_http"
    assert b"Server: headrace" in headers
    for word in (b"ython", b"aiohttp", b"bytearray", b"aaaa"):
        assert word not in headers + body
