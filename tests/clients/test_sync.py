"""The client without asyncio: the server runs in the loop of the test, the client in a thread."""

import asyncio
import threading

import pytest

from fakes import FakeEngine
from headrace_client import (
    BadRequest,
    Client,
    ConnectFailed,
    ConnectionLost,
    Finished,
    Started,
    TextDelta,
)
from stream_app import MODEL, serve_streams

# FakeEngine answers the 3 bytes of "Hi!" with the letters from chr(ord("a") + 3) on.
ANSWER = "defg"


async def test_answers_are_iterated_over_and_known_in_the_end():
    def program(url):
        with Client(url) as client:
            assert client.hello().model == MODEL
            with client.complete("Hi!", max_tokens=4) as stream:
                text = "".join(delta.text for delta in stream)
                assert next(stream, None) is None
            assert stream.request_id == "r0"
            assert (stream.finish_reason, stream.stop_reason) == ("length", None)
            assert stream.usage is not None
            assert stream.usage.completion_tokens == 4
            assert stream.timing is not None
            return text, client.chat("Hi!", max_tokens=2).text()

    async with serve_streams() as gateway:
        text, chat = await asyncio.to_thread(program, gateway.base_url)
    assert (text, len(chat)) == (ANSWER, 2)


async def test_events_are_typed():
    def program(url):
        with Client(url) as client:
            return list(client.complete("Hi!", max_tokens=4).events())

    async with serve_streams() as gateway:
        first, *texts, last = await asyncio.to_thread(program, gateway.base_url)
    assert isinstance(first, Started)
    assert "".join(t.text for t in texts if isinstance(t, TextDelta)) == ANSWER
    assert isinstance(last, Finished)


@pytest.mark.parametrize("how", ["leave", "cancel"])
async def test_an_answer_can_be_ended_early(how):
    engine = FakeEngine()

    def program(url):
        with Client(url) as client:
            with client.complete("Hi!", max_tokens=1000) as stream:
                next(stream)
                if how == "cancel":
                    stream.cancel()
                    stream.text()
                    return stream.finish_reason
            return None

    async with serve_streams(engine) as gateway:
        reason = await asyncio.to_thread(program, gateway.base_url)
        await engine.wait_until_idle()
    assert reason in (("cancelled", "length") if how == "cancel" else (None,))


async def test_several_threads_share_a_client():
    def program(url):
        with Client(url) as client:
            texts = {}

            def ask(n):
                texts[n] = client.complete("x" * n, max_tokens=2).text()

            threads = [threading.Thread(target=ask, args=(n,)) for n in range(1, 9)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return texts

    async with serve_streams() as gateway:
        texts = await asyncio.to_thread(program, gateway.base_url)
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    assert texts == {n: alphabet[n : n + 2] for n in range(1, 9)}


async def test_errors_are_raised_where_they_were_asked_for():
    def program(url):
        with Client(url) as client, pytest.raises(BadRequest):
            client.chat("Hi!", temperature=-1)

    async with serve_streams() as gateway:
        await asyncio.to_thread(program, gateway.base_url)


def test_without_a_server_connecting_fails_and_the_thread_ends():
    num_threads = threading.active_count()
    with Client("http://127.0.0.1:1", max_retries=0) as client, pytest.raises(ConnectFailed):
        client.chat("Hi!")
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.hello()
    assert threading.active_count() == num_threads


async def test_closing_ends_open_answers():
    engine = FakeEngine()
    engine.hold()

    def program(url):
        client = Client(url)
        stream = client.complete("Hi!", max_tokens=4)
        reading = threading.Thread(target=lambda: errors.append(read(stream)))
        reading.start()
        client.close()
        reading.join()

    def read(stream):
        try:
            return stream.text()
        except (ConnectionLost, RuntimeError) as error:
            return error

    errors: list[object] = []
    async with serve_streams(engine) as gateway:
        await asyncio.to_thread(program, gateway.base_url)
        await engine.wait_until_idle()
    assert isinstance(errors[0], ConnectionLost | RuntimeError)
