import asyncio

import pytest

from bench.carrier_load import StreamFailed, load_sse, load_websocket
from fakes import FakeEngine

LOADS = [load_websocket, load_sse]


async def begin():
    await asyncio.sleep(0)


@pytest.mark.parametrize("load", LOADS)
async def test_tokens_and_messages_of_all_streams_are_counted(load, start_gateway):
    gateway = await start_gateway(FakeEngine())
    prompts = [[97, 98, 99]] * 40  # more than one websocket carries
    counts = await load(gateway.url, prompts, 5, begin)
    assert counts.output_tokens == 200
    assert counts.messages >= 40
    assert 0 < counts.start_s < counts.end_s


@pytest.mark.parametrize("load", LOADS)
async def test_an_answer_that_is_refused_is_a_failure(load, start_gateway):
    gateway = await start_gateway(FakeEngine())
    with pytest.RaisesGroup(StreamFailed):
        await load(gateway.url, [[-1]], 5, begin)
