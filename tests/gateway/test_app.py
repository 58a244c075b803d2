"""Whole-application promises that belong to no single handler."""

import asyncio
import random

import pytest

from connections import connection, posted
from fakes import FakeEngine
from gateway.openapi_routes import OPERATIONS


@pytest.mark.parametrize("seed", range(3))
async def test_after_many_clients_of_which_some_leave_nothing_is_left(start_gateway, seed):
    gateway = await start_gateway(FakeEngine(max_num_seqs=4, max_num_queued_requests=64))
    choose = random.Random(seed)
    gateway.engine.hold()

    async def client(leaves):
        body = {
            "prompt": "x" * choose.randint(1, 20),
            "stream": choose.random() < 0.5,
            "max_tokens": choose.randint(1, 8),
            "stop": choose.choice([None, "e"]),
        }
        async with posted(gateway.server.port, body) as (reader, _):
            if not leaves:
                await reader.readuntil(b"finish_reason")

    async with asyncio.TaskGroup() as group:
        for number in range(32):
            group.create_task(client(leaves=number % 3 == 0))
        await gateway.engine.wait_for_requests(16)
        gateway.engine.release()
    await gateway.engine.wait_until_idle()
    stats = gateway.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)


async def test_gateways_in_one_process_share_nothing(start_gateway):
    first, second = await start_gateway(), await start_gateway()
    assert (await first.post("/v1/completions", {"prompt": "x", "max_tokens": 1}))[0] == 200
    assert second.engine.submitted == []
    async with second.session.get("/metrics") as response:
        text = await response.text()
    assert 'headrace_e2e_request_latency_seconds_count{model_name="tiny"} 0.0' in text


@pytest.mark.parametrize("path", [o.path for o in OPERATIONS if o.method == "get"])
async def test_an_answer_to_head_has_no_body(gateway, path):
    path = path.replace("{name}", "chat.js").replace("{response_id}", "resp_1?stream=true")
    async with connection(gateway.server.port) as (reader, writer):
        for method, target in (("HEAD", path), ("GET", "/health")):
            writer.write(f"{method} {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 ")
        # What comes next is the next answer.
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("path", ["/v1/stream", "/v1/responses", "/v1/steps/stream"])
@pytest.mark.parametrize(
    "header",
    ["Sec-WebSocket-Key: \xff", "Sec-WebSocket-Key: AAAA", "Sec-WebSocket-Version: 12", "A: b"],
)
async def test_what_is_no_handshake_is_status_400(gateway, path, header, caplog):
    head = (
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: headrace.v1.json, key.sk-1\r\n"
        f"{header}\r\n\r\n"
    )
    async with connection(gateway.server.port) as (reader, writer):
        writer.write(head.encode("latin-1"))
        # aiohttp answers what is no HTTP at all in 1.0.
        assert (await reader.readline()).split(b" ")[1] == b"400"
    assert caplog.records == []  # what anybody can send is no news, and may hold a key
