"""AsyncClient over connections that break: the answer is the same."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutting_proxy import cutting_proxy
from fakes import FakeEngine
from gateway.connections import STREAM_CONNECTIONS
from gateway.resumption import RESUME_STORE
from headrace_client import AsyncClient, ConnectionLost, Overloaded, Timeouts, retry
from headrace_client import client as client_module
from scripted_server import HELLO, delta, done, scripted_server
from stream_app import serve_streams, until

TEXT = "Grüße, 世界! 😀 fine. " * 3


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(retry, "LONGEST_DELAY_S", 0.01)


def make_engine() -> FakeEngine:
    engine = FakeEngine(max_model_len=4096)
    engine.script_all(TEXT)
    return engine


async def ask(client: AsyncClient, **options) -> tuple[str, list[int], str | None]:
    async with await client.complete(
        "Hi!", max_tokens=1000, return_token_ids=True, **options
    ) as stream:
        text, ids = "", []
        async for delta in stream:
            text += delta.text
            ids += delta.token_ids
    return text, ids, stream.finish_reason


async def test_pulled_in_mid_answer_the_text_goes_on():
    engine = make_engine()
    engine.hold()
    async with (
        serve_streams(engine) as gateway,
        cutting_proxy(gateway.client.port) as proxy,
        AsyncClient(proxy.base_url) as client,
        await client.complete("Hi!", max_tokens=1000) as stream,
    ):
        engine.step(3)
        text = (await anext(stream)).text
        for _ in range(3):
            proxy.refuse(True)
            proxy.cut_all()
            await until(lambda: not gateway.app[STREAM_CONNECTIONS])
            engine.step(4)
            proxy.refuse(False)
            text += (await anext(stream)).text
        engine.release()
        text += await stream.text()
    assert text == TEXT
    assert engine.num_aborts == 0
    assert proxy.num_connections >= 4


# Bytes after which the first, second, ... connection is cut. The handshake and hello take about
# 600, so that some are cut in it, some between messages, most in the middle of one.
CUTS = st.lists(st.integers(1, 1500), max_size=8)


@settings(max_examples=40, deadline=None)
@given(cuts=CUTS, num_streams=st.integers(1, 4), encoding=st.sampled_from(["json", "msgpack"]))
async def test_the_text_is_the_same_wherever_the_connection_is_cut(cuts, num_streams, encoding):
    engine = make_engine()
    async with (
        serve_streams(engine) as gateway,
        cutting_proxy(gateway.client.port, cuts) as proxy,
        AsyncClient(proxy.base_url, encoding=encoding, max_retries=len(cuts)) as client,
    ):
        answers = await asyncio.gather(*(ask(client) for _ in range(num_streams)))
        await client.close()
        # Answers whose `accepted` was lost ran on for nobody until the client had left.
        for kept in list(gateway.app[RESUME_STORE]._streams.values()):
            gateway.app[RESUME_STORE].drop(kept)
    for text, ids, finish_reason in answers:
        assert text == TEXT
        assert bytes(i for i in ids if i < 256) == TEXT.encode()
        assert finish_reason == "stop"


async def test_a_server_that_forgot_the_stream_is_connection_lost_that_says_so():
    engine = make_engine()
    engine.hold()
    async with (
        serve_streams(engine, resume_max_streams=1) as gateway,
        cutting_proxy(gateway.client.port) as proxy,
        AsyncClient(proxy.base_url) as client,
    ):
        stream = await client.complete("Hi!", max_tokens=1000)
        [kept] = gateway.app[RESUME_STORE]._streams.values()
        proxy.cut_all()
        gateway.app[RESUME_STORE].drop(kept)
        with pytest.raises(ConnectionLost, match="could not be resumed"):
            await stream.text()
        engine.release()


async def test_a_server_that_stays_away_is_given_up_once_it_has_given_up_itself():
    engine = make_engine()
    engine.hold()
    async with (
        serve_streams(engine, resume_ttl_s=0.05) as gateway,
        cutting_proxy(gateway.client.port) as proxy,
        AsyncClient(proxy.base_url) as client,
    ):
        stream = await client.complete("Hi!", max_tokens=1000)
        proxy.refuse(True)
        proxy.cut_all()
        with pytest.raises(ConnectionLost, match="the connection to the server was lost"):
            await stream.text()
        await engine.wait_until_idle()


async def test_cancelled_while_there_is_no_connection_it_ends_as_soon_as_there_is_one():
    engine = make_engine()
    engine.hold()
    async with (
        serve_streams(engine) as gateway,
        cutting_proxy(gateway.client.port) as proxy,
        AsyncClient(proxy.base_url) as client,
    ):
        stream = await client.complete("Hi!", max_tokens=1000)
        proxy.refuse(True)
        proxy.cut_all()
        await until(lambda: client._lost != [])
        stream.cancel()
        proxy.refuse(False)
        assert await stream.text() == ""
        assert stream.finish_reason == "cancelled"
        assert engine.num_aborts == 1


async def test_without_resume_a_lost_connection_ends_its_streams():
    engine = make_engine()
    engine.hold()
    async with (
        serve_streams(engine) as gateway,
        cutting_proxy(gateway.client.port) as proxy,
        AsyncClient(proxy.base_url, resume=False) as client,
    ):
        stream = await client.complete("Hi!", max_tokens=1000)
        proxy.cut_all()
        with pytest.raises(ConnectionLost):
            await stream.text()
        await engine.wait_until_idle()


async def test_closing_the_client_ends_what_waits_for_a_connection():
    engine = make_engine()
    engine.hold()
    async with serve_streams(engine) as gateway, cutting_proxy(gateway.client.port) as proxy:
        async with AsyncClient(proxy.base_url) as client:
            stream = await client.complete("Hi!", max_tokens=1000)
            proxy.refuse(True)
            proxy.cut_all()
            await until(lambda: client._lost != [])
        with pytest.raises(ConnectionLost, match="the client was closed"):
            await stream.text()


async def test_a_request_without_room_is_sent_again_after_the_time_that_the_server_says(
    monkeypatch,
):
    engine = make_engine()
    engine.refuse("queued_requests", retry_after_s=0.001)
    async with serve_streams(engine) as gateway, AsyncClient(gateway.base_url) as client:
        with pytest.raises(Overloaded):
            await client.complete("Hi!")
        prepared = []
        monkeypatch.setattr(
            "headrace_client.client.backoff_s", lambda attempt, after: prepared.append(after) or 0.0
        )
        asking = asyncio.create_task(ask(client))
        await until(lambda: prepared)
        engine._refusal = None
        assert (await asking)[0] == TEXT
    assert prepared[0] == 0.001


async def test_the_total_time_limit_ends_the_attempts_as_well():
    engine = make_engine()
    engine.refuse("queued_requests", retry_after_s=60.0)
    async with (
        serve_streams(engine) as gateway,
        AsyncClient(gateway.base_url, timeout=Timeouts(total_s=5.0)) as client,
    ):
        with pytest.raises(Overloaded):
            await client.complete("Hi!")


def first_then(first, others):
    """A script whose first connection accepts a stream, and what the others do."""
    num_connections = 0

    async def script(server):
        nonlocal num_connections
        num_connections += 1
        if num_connections > 1:
            await others(server)
            return
        stream_id = (await server.receive())["id"]
        accepted = {"request_id": "r", "prompt_tokens": 1, "resume_token": "t"}
        await server.send({"type": "accepted", "id": stream_id, **accepted})
        await first(server, stream_id)
        await server.ws.close()

    return script


@pytest.fixture
def waits(monkeypatch):
    """Attempts, and the times that the server asked for, of all waits; none takes any time."""
    waits = []

    def backoff(attempt, retry_after_s=None):
        waits.append((attempt, retry_after_s))
        return 0.0

    monkeypatch.setattr(client_module, "backoff_s", backoff)
    return waits


async def test_a_server_that_says_hello_and_drops_is_asked_less_and_less_often(waits):
    async def first(server, stream_id):
        await server.send(delta(stream_id, 0, "half"))

    async def others(server):
        await server.ws.close()

    script = first_then(first, others)
    async with scripted_server(script) as url, AsyncClient(url) as client:
        stream = await client.complete("Hi!")
        assert (await anext(stream)).text == "half"
        await until(lambda: len(waits) >= 4)
    assert waits[:4] == [(1, None), (2, None), (3, None), (4, None)]
    with pytest.raises(ConnectionLost, match="the client was closed"):
        await stream.text()


async def test_a_server_that_always_drops_is_given_up(waits, monkeypatch):
    monkeypatch.setattr(client_module, "MAX_FAILURES", 5)

    async def first(server, stream_id):
        await server.send(delta(stream_id, 0, "half"))

    async def others(server):
        resume = await server.receive()
        # As if all was well again; but nothing new comes.
        await server.send({"type": "resumed", "id": resume["id"], "request_id": "r"})
        await server.ws.close()

    async with scripted_server(first_then(first, others)) as url, AsyncClient(url) as client:
        stream = await client.complete("Hi!")
        with pytest.raises(ConnectionLost, match="the connection to the server was lost"):
            await stream.text()
    assert len(waits) == 6


@pytest.mark.parametrize(
    ("told", "used"), [(1e9, 600.0), (30, 30), ("x", 30.0), (True, 30.0), (None, 30.0)]
)
async def test_what_a_server_says_of_its_patience_is_believed_within_reason(told, used):
    async def script(server):
        await server.wait_closed()

    hello = {**HELLO, "limits": {**HELLO["limits"], "resume_ttl_s": told}}
    async with scripted_server(script, hello=hello) as url, AsyncClient(url) as client:
        await client.hello()
        assert client._resume_ttl_s == used


async def test_who_shall_come_back_in_an_hour_is_told_now():
    engine = make_engine()
    engine.refuse("queued_requests", retry_after_s=3600.0)
    async with serve_streams(engine) as gateway, AsyncClient(gateway.base_url) as client:
        with pytest.raises(Overloaded) as caught:
            await client.complete("Hi!")
    assert caught.value.retry_after_s == 3600.0


async def test_a_server_that_said_when_to_come_back_is_not_asked_sooner(waits):
    async def first(server, stream_id):
        await server.send({"type": "goaway", "reason": "restart", "retry_after_s": 2})

    async def others(server):
        resume = await server.receive()
        assert (resume["type"], resume["token"]) == ("resume", "t")
        stream_id = resume["id"]
        await server.send({"type": "resumed", "id": stream_id, "request_id": "r"})
        await server.send(delta(stream_id, 0, "whole"), done(stream_id, 1))
        await server.wait_closed()

    script = first_then(first, others)
    async with scripted_server(script) as url, AsyncClient(url) as client:
        assert await (await client.complete("Hi!")).text() == "whole"
    assert waits == [(1, 2)]
