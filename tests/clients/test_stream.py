import asyncio

import pytest

from fakes import FakeEngine
from headrace_client import AsyncClient, GenerationFailed, GenerationTimeout, Timeouts
from scripted_server import delta, done, scripted_server
from stream_app import serve_streams

# ---- cancelling --------------------------------------------------------------------------------


async def test_cancel_ends_the_stream_with_what_is_left_and_the_usage():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway, AsyncClient(gateway.base_url) as client:
        stream = await client.complete("Hi!", max_tokens=100)
        engine.step(3)
        stream.cancel()
        stream.cancel()
        assert await stream.text() == "def"
        assert stream.finish_reason == "cancelled"
        assert stream.usage is not None
        assert stream.usage.completion_tokens == 3
        stream.cancel()  # after the end: nothing happens
        engine.release()
        assert await (await client.complete("Hi!", max_tokens=1)).text() == "d"


async def test_leaving_the_block_early_cancels_in_the_server():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway, AsyncClient(gateway.base_url) as client:
        async with await client.complete("Hi!", max_tokens=100) as stream:
            engine.step()
            async for piece in stream:
                assert piece.text == "d"
                break
        await engine.wait_until_idle()
        # The connection lives on.
        engine.release()
        assert await (await client.complete("Hi!", max_tokens=1)).text() == "d"
    assert engine.num_aborts == 1


async def test_leaving_the_block_after_the_end_sends_nothing():
    async with (
        serve_streams() as gateway,
        AsyncClient(gateway.base_url) as client,
        await client.complete("Hi!", max_tokens=4) as stream,
    ):
        await stream.text()
    assert gateway.engine.num_aborts == 0


async def test_cancelling_the_task_that_waits_for_acceptance_cancels_in_the_server():
    cancelled = asyncio.Event()

    async def script(server):
        message = await server.receive()
        cancel = await server.receive()
        assert cancel == {"type": "cancel", "id": message["id"]}
        cancelled.set()
        await server.send(done(message["id"], 0, finish_reason="cancelled"))
        await server.wait_closed()

    async with scripted_server(script) as url, AsyncClient(url) as client:
        await client.hello()
        asking = asyncio.create_task(client.chat("Hi!"))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await cancelled.wait()


async def test_cancelling_a_read_loses_nothing():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway, AsyncClient(gateway.base_url) as client:
        stream = await client.complete("Hi!", max_tokens=4)
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        engine.release()
        assert await stream.text() == "defg"


# ---- failures ----------------------------------------------------------------------------------


async def test_an_error_after_acceptance_is_generation_failed_and_the_text_before_it_is_kept():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway, AsyncClient(gateway.base_url) as client:
        stream = await client.complete("Hi!", max_tokens=100)
        engine.step(2)
        engine.fail_requests("the step failed")
        assert (await anext(stream)).text == "de"
        for _ in range(2):  # and again, whenever it is asked
            with pytest.raises(GenerationFailed, match="the step failed") as error:
                await anext(stream)
    assert error.value.status == 500
    assert stream.finish_reason is None


# ---- time limits -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("timeouts", "limit", "num_steps"),
    [
        (Timeouts(first_token_s=0.05), "first_token", 0),
        (Timeouts(idle_s=0.05), "idle", 1),
        (Timeouts(total_s=0.05), "total", 0),
        (Timeouts(total_s=0.05), "total", 1),
    ],
)
async def test_a_limit_that_passes_raises_and_cancels_in_the_server(timeouts, limit, num_steps):
    engine = FakeEngine()
    engine.hold()
    async with (
        serve_streams(engine) as gateway,
        AsyncClient(gateway.base_url, timeout=timeouts) as client,
    ):

        async def ask():
            stream = await client.complete("Hi!", max_tokens=100)
            engine.step(num_steps)
            await stream.text()

        with pytest.raises(GenerationTimeout) as error:
            await ask()
        await engine.wait_until_idle()
    assert (error.value.limit, error.value.after_s) == (limit, 0.05)


async def test_a_number_as_timeout_limits_the_whole_answer():
    cancelled = asyncio.Event()

    async def script(server):
        await server.receive()
        assert (await server.receive())["type"] == "cancel"
        cancelled.set()
        await server.wait_closed()

    async with scripted_server(script) as url, AsyncClient(url, timeout=0.05) as client:
        with pytest.raises(GenerationTimeout) as error:
            await client.chat("Hi!")
        await cancelled.wait()
    assert error.value.limit == "total"


async def test_text_that_has_arrived_is_read_even_when_the_limit_has_passed():
    async def script(server):
        stream_id = await server.accept()
        await server.send(delta(stream_id, 0, "a"))
        may_go_on = await server.receive()  # the client's start of another stream
        await server.send(delta(stream_id, 1, "b"), done(stream_id, 2))
        await server.send(done(may_go_on["id"], 0, finish_reason="cancelled"))
        await server.wait_closed()

    timeouts = Timeouts(idle_s=0.01)
    async with scripted_server(script) as url, AsyncClient(url, timeout=timeouts) as client:
        stream = await client.chat("Hi!")
        assert (await anext(stream)).text == "a"
        await client.chat("Hi!")
        await asyncio.sleep(0.02)  # longer than the limit
        assert await stream.text() == "b"


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_limit_must_be_positive(value):
    with pytest.raises(ValueError, match="idle_s"):
        Timeouts(idle_s=value)
