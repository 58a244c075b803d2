"""Many streams at once, of which many are cut off anywhere: afterwards nothing is left."""

import asyncio
import json
import random

import aiohttp

from connections import posted
from headrace_client import AsyncClient
from serving import ServedProcess, wait_until_idle

NUM_STREAMS = 64
WARM_ROUNDS = 2
ROUNDS = 4
# What the process may grow over all rounds after the warm ones: 16 KiB for each request. It grows
# by a few, until after some thousands every arena of the allocators has seen its busiest moment.
MAX_GROWTH_BYTES = NUM_STREAMS * ROUNDS * 16 << 10


def random_body(choose: random.Random) -> dict:
    """A request that takes from one to hundreds of steps."""
    return {
        "prompt": "".join(choose.choices("abcdefgh ", k=choose.choice([1, 15, 16, 40, 150]))),
        "max_tokens": choose.choice([1, 20, 150, 350]),
        "ignore_eos": True,
        "temperature": choose.choice([0, 1]),
        "seed": choose.choice([None, 1]),
    }


class Client:
    """One request that is read for a while and then dropped, or read to its end."""

    def __init__(self, server: ServedProcess, choose: random.Random) -> None:
        self.server = server
        self.body = random_body(choose)
        self.leaves = choose.random() < 0.5
        self.after_reads = choose.choice([0, 1, 3, 10])  # dropped after so many
        self.run = choose.choice([self.sse, self.whole, self.websocket])

    async def sse(self) -> None:
        async with posted(self.server.port, self.body | {"stream": True}) as (reader, _):
            if not self.leaves:
                tail = b""
                while b"data: [DONE]\n\n" not in tail:
                    part = await reader.read(65536)
                    assert part, "the stream broke off"
                    tail = (tail + part)[-65536 - 16 :]
                return
            for _ in range(self.after_reads):
                await reader.readline()

    async def whole(self) -> None:
        async with posted(self.server.port, self.body) as (reader, _):
            if self.leaves:
                await asyncio.sleep(self.after_reads / 1000)
                return
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 "), head
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            usage = json.loads(await reader.readexactly(length))["usage"]
            assert usage["completion_tokens"] == self.body["max_tokens"]

    async def websocket(self) -> None:
        options = {name: value for name, value in self.body.items() if name != "prompt"}
        async with AsyncClient(self.server.url) as client:
            stream = await client.complete(self.body["prompt"], **options)
            if not self.leaves:
                await stream.text()
                assert stream.usage.completion_tokens == self.body["max_tokens"]
                return
            for _ in range(self.after_reads):
                try:
                    await anext(stream)
                except StopAsyncIteration:
                    break
            # Cancelled, or only cut off: the client's `close` says nothing about its streams.
            if self.after_reads % 2:
                stream.cancel()


async def test_after_many_streams_and_random_disconnects_nothing_is_left(tiny_server):
    choose = random.Random(20)
    connector = aiohttp.TCPConnector(force_close=True)  # no connection of ours that stays open
    async with aiohttp.ClientSession(tiny_server.url, connector=connector) as session:
        idle = await wait_until_idle(session)
        memory, num_asked = [], 0
        for _ in range(WARM_ROUNDS + ROUNDS):
            clients = [Client(tiny_server, choose) for _ in range(NUM_STREAMS)]
            async with asyncio.TaskGroup() as group:
                for client in clients:
                    group.create_task(client.run())
            num_asked += sum(client.body["max_tokens"] for client in clients)
            after = await wait_until_idle(session)
            memory.append(tiny_server.rss_bytes)
            assert after["kv_blocks_free"] == after["kv_blocks"]
            assert after["kv_cache_usage_ratio"] == 0
            assert after["compiles_after_ready"] == 0
            assert after["step_failures_total"] == 0
    names = ("requests_finished_total{length}", "requests_finished_total{abort}")
    finished = [after[name] - idle.get(name, 0) for name in names]
    assert sum(finished) <= NUM_STREAMS * (WARM_ROUNDS + ROUNDS)
    assert min(finished) > 50  # both kinds were there
    # Who left is not computed to the end; about half of the clients leave.
    num_generated = after["generation_tokens_total"] - idle["generation_tokens_total"]
    assert num_generated < 0.75 * num_asked
    assert after["preemptions_total"] > idle["preemptions_total"]
    assert memory[-1] - memory[WARM_ROUNDS - 1] < MAX_GROWTH_BYTES, memory
