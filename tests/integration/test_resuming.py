"""A real server behind a proxy that cuts: the answers are those of whole connections."""

import asyncio
import random

import pytest

from cutting_proxy import cutting_proxy
from headrace_client import AsyncClient, retry
from serving import wait_until_idle

NUM_STREAMS = 8
OPTIONS = {"max_tokens": 150, "ignore_eos": True, "seed": 7, "return_token_ids": True}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(retry, "LONGEST_DELAY_S", 0.01)


async def ask(client: AsyncClient, number: int) -> tuple[str, list[int], str | None]:
    stream = await client.complete(f"Once upon a time {number}", **OPTIONS)
    text, ids = "", []
    async for delta in stream:
        text += delta.text
        ids += delta.token_ids
    return text, ids, stream.finish_reason


async def test_answers_over_connections_that_are_cut_are_those_of_whole_ones(tiny_server, session):
    async with AsyncClient(tiny_server.url) as client:
        whole = await asyncio.gather(*(ask(client, number) for number in range(NUM_STREAMS)))
    rng = random.Random(7)
    cuts = [rng.randrange(300, 6000) for _ in range(50)]
    async with (
        cutting_proxy(tiny_server.port, cuts) as proxy,
        AsyncClient(proxy.base_url, max_retries=len(cuts)) as client,
    ):
        cut = await asyncio.gather(*(ask(client, number) for number in range(NUM_STREAMS)))
    assert cut == whole
    assert [len(ids) for _, ids, _ in cut] == [150] * NUM_STREAMS
    assert proxy.num_cuts > 5
    numbers = await wait_until_idle(session)
    assert numbers["kv_blocks_free"] == numbers["kv_blocks"]
