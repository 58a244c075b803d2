import asyncio

import pytest

from jaxengine.output_stream import OutputStream
from jaxengine.outputs import FinishReason, RequestOutput


def make_output(*token_ids: int, reason: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        new_token_ids=token_ids,
        new_token_times_s=(0.0,) * len(token_ids),
        finish_reason=reason,
    )


@pytest.fixture
def aborted() -> list[str]:
    return []


@pytest.fixture
def stream(aborted) -> OutputStream:
    return OutputStream("r", aborted.append)


async def test_outputs_come_in_order_and_the_iteration_ends_after_the_last(stream, aborted):
    stream.put(make_output(1))
    assert await anext(stream) == make_output(1)
    stream.put(make_output(2, reason=FinishReason.LENGTH))
    assert await anext(stream) == make_output(2, reason=FinishReason.LENGTH)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert aborted == []


async def test_a_waiting_reader_is_woken(stream):
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert not reader.done()
    stream.put(make_output(1))
    assert await reader == make_output(1)


async def test_outputs_merge_while_nobody_reads(stream):
    for token_id in range(1000):
        stream.put(make_output(token_id))
    stream.put(make_output(1000, reason=FinishReason.STOP))
    outputs = [output async for output in stream]
    assert outputs == [make_output(*range(1001), reason=FinishReason.STOP)]


async def test_nothing_comes_after_the_last_output(stream):
    stream.put(make_output(1, reason=FinishReason.LENGTH))
    stream.put(make_output(2))
    stream.put(make_output(reason=FinishReason.ABORT))
    assert [output async for output in stream] == [make_output(1, reason=FinishReason.LENGTH)]


async def test_leaving_early_aborts_once(stream, aborted):
    async with stream:
        stream.put(make_output(1))
        await anext(stream)
    assert aborted == ["r"]
    stream.close()
    assert aborted == ["r"]


async def test_leaving_by_an_error_aborts_and_lets_the_error_through(stream, aborted):
    with pytest.raises(ZeroDivisionError):
        async with stream:
            raise ZeroDivisionError
    assert aborted == ["r"]


async def test_leaving_after_the_last_output_aborts_nothing(stream, aborted):
    async with stream:
        stream.put(make_output(1, reason=FinishReason.LENGTH))
    assert aborted == []


async def test_what_came_before_closing_can_still_be_read(stream):
    stream.put(make_output(1))
    stream.close()
    stream.put(make_output(2))
    assert [output async for output in stream] == [make_output(1)]


async def test_closing_ends_the_wait_of_a_reader(stream):
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    stream.close()
    with pytest.raises(StopAsyncIteration):
        await reader


async def test_a_cancelled_reader_loses_no_token(stream):
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    stream.put(make_output(1))
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    stream.put(make_output(2))
    assert await anext(stream) == make_output(1, 2)
