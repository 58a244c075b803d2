"""Whole-application promises that belong to no single handler."""

import asyncio
import random

import pytest

from connections import posted
from fakes import FakeEngine


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
