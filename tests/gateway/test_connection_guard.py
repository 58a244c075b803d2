"""Clients that are too slow, on real sockets."""

import asyncio
import json
import socket

from connections import closed, connection
from gateway.connection_guard import plain_response
from gateway.errors import Unavailable

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def read_answer(reader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    [length] = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    return head + await reader.readexactly(int(length.split(b":")[1]))


async def test_a_head_that_does_not_end_is_told_408_and_closed(start_gateway):
    gateway = await start_gateway(header_timeout_s=0.05)
    async with connection(gateway.server.port) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: loc")
        answer = await reader.read()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"Connection: close" in head
    assert json.loads(body)["error"]["code"] == "request_timeout"


async def test_a_head_of_one_byte_at_a_time_gains_no_time(start_gateway):
    gateway = await start_gateway(header_timeout_s=0.2)

    async def drip(writer):
        for byte in HEAD[:-1] * 100:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.01)

    async with connection(gateway.server.port) as (reader, writer):
        dripping = asyncio.create_task(drip(writer))
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        dripping.cancel()


async def test_a_connection_that_says_nothing_is_closed_without_a_word(start_gateway):
    gateway = await start_gateway(header_timeout_s=0.05)
    async with connection(gateway.server.port) as (reader, _):
        assert await reader.read() == b""


async def test_the_second_head_of_a_connection_has_the_same_time(start_gateway):
    gateway = await start_gateway(header_timeout_s=0.1)
    async with connection(gateway.server.port) as (reader, writer):
        writer.write(HEAD)
        assert b" 200 " in await read_answer(reader)
        writer.write(HEAD[:20])
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")


async def test_an_idle_connection_after_a_request_may_wait_longer(start_gateway):
    gateway = await start_gateway(header_timeout_s=0.05)
    async with connection(gateway.server.port) as (reader, writer):
        for _ in range(3):
            writer.write(HEAD)
            assert b" 200 " in await read_answer(reader)
            await asyncio.sleep(0.1)  # the time itself is the matter


async def test_a_request_that_is_answered_late_is_not_late_itself(start_gateway):
    gateway = await start_gateway(header_timeout_s=0.05)
    gateway.engine.hold()
    answering = asyncio.create_task(
        gateway.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    )
    await gateway.engine.wait_for_requests(1)
    await asyncio.sleep(0.1)
    gateway.engine.release()
    assert (await answering)[0] == 200


async def test_a_websocket_may_be_silent(start_gateway):
    gateway = await start_gateway(header_timeout_s=0.05)
    async with gateway.session.ws_connect("/v1/stream", protocols=["headrace.v1.json"]) as ws:
        assert json.loads((await ws.receive()).data)["type"] == "hello"
        await asyncio.sleep(0.1)
        await ws.send_json({"type": "ping", "t": 1})
        assert json.loads((await ws.receive()).data)["type"] == "pong"


async def test_a_body_that_does_not_end_is_told_408(start_gateway):
    gateway = await start_gateway(body_read_timeout_s=0.05)
    async with connection(gateway.server.port) as (reader, writer):
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
            b"Content-Type: application/json\r\n\r\n{"
        )
        assert (await read_answer(reader)).startswith(b"HTTP/1.1 408 ")


async def test_who_does_not_fetch_a_large_answer_is_cut_off(start_gateway):
    """A whole answer, which no deadline of its own guards, of many times the socket buffers."""
    gateway = await start_gateway(send_timeout_s=0.1, max_body_bytes=64 << 20)
    reader_socket = socket.socket()
    reader_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader_socket.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(reader_socket, ("127.0.0.1", gateway.server.port))
    _, writer = await asyncio.open_connection(sock=reader_socket, limit=1)
    writer.transport.pause_reading()
    for _ in range(40):
        writer.write(b"GET /static/dashboard.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
    server = gateway.server._runner.server
    while len(server.connections) > 0:  # it is cut within the time limit of the test
        await asyncio.sleep(0.01)
    await closed(writer)


async def test_too_many_connections_are_told_when_to_come_back(start_gateway):
    gateway = await start_gateway(max_connections=1)
    assert (await gateway.get("/health"))[0] == 200
    async with connection(gateway.server.port) as (reader, _):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nRetry-After: 5\r\n" in answer


def test_a_plain_response_is_whole():
    error = Unavailable("no", retry_after_s=2)
    head, _, body = plain_response(error, "Service Unavailable").partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == b"HTTP/1.1 503 Service Unavailable"
    assert f"Content-Length: {len(body)}".encode() in head
    assert json.loads(body) == {"error": error.to_wire()}
