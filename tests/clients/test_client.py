"""AsyncClient against the real gateway on a FakeEngine, and against servers that go away."""

import asyncio

import pytest

from fakes import FakeEngine
from gateway.api_keys import ApiKey, hash_of_key
from gateway.connections import STREAM_CONNECTIONS
from gateway.key_ring import KeyRing
from headrace_client import (
    AsyncClient,
    BadRequest,
    ConnectionLost,
    ConnectTimeout,
    HeadraceError,
    ModelNotFound,
    NotAllowed,
    Overloaded,
    Timeouts,
    TopLogprob,
    Unavailable,
)
from scripted_server import delta, done, scripted_server
from stream_app import MODEL, serve_streams, until

both_encodings = pytest.mark.parametrize("encoding", ["json", "msgpack"])

# FakeEngine answers the 3 bytes of "Hi!" with the letters from chr(ord("a") + 3) on.
ANSWER = "defg"


# ---- answers -----------------------------------------------------------------------------------


@both_encodings
async def test_complete_streams_an_answer_with_usage_and_timing(encoding):
    async with (
        serve_streams() as gateway,
        AsyncClient(gateway.base_url, encoding=encoding) as client,
        await client.complete("Hi!", max_tokens=4) as stream,
    ):
        assert (stream.usage, stream.timing, stream.finish_reason) == (None, None, None)
        text = "".join([delta.text async for delta in stream])
    assert text == ANSWER
    assert stream.finish_reason == "length"
    assert stream.usage is not None
    assert (stream.usage.prompt_tokens, stream.usage.completion_tokens) == (3, 4)
    assert stream.timing is not None
    assert stream.timing.ttft_s == pytest.approx(0.01)
    assert stream.request_id == "r0"


@both_encodings
async def test_chat_takes_one_message_or_a_conversation(encoding):
    async with (
        serve_streams() as gateway,
        AsyncClient(gateway.base_url, encoding=encoding) as client,
    ):
        one = await client.chat("Hi!", max_tokens=1)
        await one.text()
        conversation = [{"role": "user", "content": "Hi!"}]
        other = await client.chat(conversation, max_tokens=1)
        await other.text()
    prompts = [prompt for prompt, _ in gateway.engine.submitted]
    assert prompts[0] == prompts[1]


async def test_text_returns_what_was_not_read_before():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway, AsyncClient(gateway.base_url) as client:
        stream = await client.complete("Hi!", max_tokens=4)
        engine.step()
        assert (await anext(stream)).text == "d"
        engine.release()
        assert await stream.text() == "efg"


async def test_log_probabilities_come_when_asked_for():
    async with serve_streams() as gateway, AsyncClient(gateway.base_url) as client:
        stream = await client.complete("Hi!", max_tokens=4, logprobs=1)
        entries = [entry async for delta in stream for entry in delta.logprobs]
        plain = await client.complete("Hi!", max_tokens=4)
        assert [entry async for delta in plain for entry in delta.logprobs] == []
    assert [entry.logprob for entry in entries] == [-0.1, -0.101, -0.102, -0.103]
    assert b"".join(entry.bytes for entry in entries) == b"defg"
    assert entries[0].top_logprobs == (TopLogprob(token="e", logprob=0.4, bytes=b"e"),)


async def test_token_ids_come_when_asked_for():
    async with serve_streams() as gateway, AsyncClient(gateway.base_url) as client:
        stream = await client.complete([72, 105, 33], max_tokens=4, return_token_ids=True)
        ids = [i async for delta in stream for i in delta.token_ids]
        plain = await client.complete("Hi!", max_tokens=4)
        assert [i async for delta in plain for i in delta.token_ids] == []
    assert ids == list(ANSWER.encode())


async def test_every_option_reaches_the_engine():
    async with serve_streams() as gateway, AsyncClient(gateway.base_url) as client:
        stream = await client.complete(
            "x",
            model=MODEL,
            max_tokens=7,
            min_tokens=2,
            temperature=0.5,
            top_p=0.9,
            top_k=11,
            min_p=0.1,
            seed=2**64 - 1,
            stop=["zz"],
            stop_token_ids=(3,),
            include_stop_str_in_output=True,
            ignore_eos=True,
            cache_salt="salt",
        )
        await stream.text()
    params = gateway.engine.submitted[0][1]
    assert (params.max_tokens, params.min_tokens, params.top_k, params.seed) == (
        7,
        2,
        11,
        2**64 - 1,
    )
    assert (params.temperature, params.top_p, params.min_p) == (0.5, 0.9, 0.1)
    assert (params.stop_token_ids, params.ignore_eos) == ((3,), True)
    assert gateway.engine.requests[0].cache_salt == "salt"


async def test_many_streams_share_one_socket_that_the_first_opens():
    async with serve_streams() as gateway, AsyncClient(gateway.base_url) as client:

        async def ask(n):
            return await (await client.complete("x" * n, max_tokens=2)).text()

        assert len(gateway.app[STREAM_CONNECTIONS]) == 0
        texts = await asyncio.gather(*(ask(n) for n in range(1, 24)))
        assert len(gateway.app[STREAM_CONNECTIONS]) == 1
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    assert texts == [alphabet[n : n + 2] for n in range(1, 24)]


async def test_hello_tells_model_and_limits():
    async with serve_streams() as gateway, AsyncClient(gateway.base_url) as client:
        hello = await client.hello()
    assert hello.model == MODEL
    assert hello.limits["max_model_len"] == 1024


# ---- local mistakes ----------------------------------------------------------------------------


async def test_a_wrong_option_name_is_a_type_error_and_nothing_is_sent():
    async with AsyncClient("http://127.0.0.1:1") as client:
        with pytest.raises(TypeError, match="max_token"):
            await client.chat("Hi!", max_token=5)  # type: ignore[call-arg]


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", ""])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="base_url"):
        AsyncClient(url)


def test_an_unknown_encoding_is_refused():
    with pytest.raises(ValueError, match="encoding"):
        AsyncClient(encoding="xml")  # type: ignore[arg-type]


# ---- refusals ----------------------------------------------------------------------------------


async def test_refusals_are_raised_by_kind():
    engine = FakeEngine(max_num_queued_requests=1)
    engine.hold()
    async with (
        serve_streams(engine) as gateway,
        AsyncClient(gateway.base_url, max_retries=0) as client,
    ):
        with pytest.raises(BadRequest) as bad:
            await client.chat("Hi!", temperature=-1)
        assert (bad.value.status, bad.value.param) == (400, "temperature")
        with pytest.raises(ModelNotFound) as missing:
            await client.chat("Hi!", model="other")
        assert missing.value.code == "model_not_found"
        waiting = await client.complete("Hi!", max_tokens=4)
        with pytest.raises(Overloaded) as full:
            await client.chat("Hi!")
        assert full.value.retry_after_s == 3.0
        engine.release()
        assert await waiting.text() == ANSWER


async def test_a_server_that_takes_no_connections_is_unavailable():
    engine = FakeEngine()
    engine.is_ready = False
    async with (
        serve_streams(engine) as gateway,
        AsyncClient(gateway.base_url, max_retries=0) as client,
    ):
        with pytest.raises(Unavailable) as error:
            await client.chat("Hi!")
    assert (error.value.status, error.value.retry_after_s) == (503, 5.0)


# ---- connecting --------------------------------------------------------------------------------


async def test_a_server_that_says_nothing_is_connect_timeout():
    async def script(server):
        await server.wait_closed()

    async with (
        scripted_server(script, hello=None) as url,
        AsyncClient(url, timeout=Timeouts(connect_s=0.05), max_retries=0) as client,
    ):
        with pytest.raises(ConnectTimeout):
            await client.chat("Hi!")


async def test_a_lost_connection_ends_its_streams_and_the_next_request_connects_anew():
    connections = []

    async def script(server):
        connections.append(server)
        stream_id = await server.accept()
        await server.send(delta(stream_id, 0, "half"))
        if len(connections) == 1:
            server.ws._req.transport.abort()
        else:
            await server.send(done(stream_id, 1))
            await server.wait_closed()

    async with scripted_server(script) as url, AsyncClient(url) as client:
        stream = await client.chat("Hi!")
        assert (await anext(stream)).text == "half"
        with pytest.raises(ConnectionLost):
            await anext(stream)
        assert await (await client.chat("Hi!")).text() == "half"


async def test_after_goaway_new_streams_take_a_new_connection_and_old_ones_go_on():
    connections = []
    may_close = asyncio.Event()

    async def script(server):
        connections.append(server)
        stream_id = await server.accept()
        if len(connections) == 1:
            await server.send({"type": "goaway", "reason": "restart", "retry_after_s": 2})
            await may_close.wait()
            await server.send(delta(stream_id, 0, "old"))
            await server.ws.close(code=1012)
        else:
            await server.send(delta(stream_id, 0, "new"), done(stream_id, 1))
            await server.wait_closed()

    async with scripted_server(script) as url, AsyncClient(url) as client:
        first = await client.chat("Hi!")
        await until(lambda: not client._connections[-1].takes_streams)
        assert await (await client.chat("Hi!")).text() == "new"
        may_close.set()
        assert (await anext(first)).text == "old"
        with pytest.raises(ConnectionLost):
            await anext(first)
    assert len(connections) == 2


async def test_closing_the_client_ends_its_streams():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway:
        async with AsyncClient(gateway.base_url) as client:
            stream = await client.chat("Hi!")
        with pytest.raises(ConnectionLost, match="closed"):
            await stream.text()
        await engine.wait_until_idle()


# ---- keys --------------------------------------------------------------------------------------


def key_ring() -> KeyRing:
    return KeyRing([ApiKey(name="alice", sha256=hash_of_key("the key"))])


async def test_a_key_lets_in_and_a_wrong_one_or_none_does_not(start_gateway):
    gateway = await start_gateway(keys=key_ring())
    async with (
        AsyncClient(gateway.url, api_key="the key") as client,
        await client.complete("Hi!", max_tokens=4) as stream,
    ):
        assert await stream.text() == ANSWER
    for wrong in (None, "another key"):
        async with AsyncClient(gateway.url, api_key=wrong) as client:
            with pytest.raises(NotAllowed) as error:
                await client.complete("Hi!")
        assert error.value.status == 401
    assert [request.tenant for request in gateway.engine.requests] == ["alice"]


async def test_a_key_that_no_header_can_carry_is_refused_at_once():
    with pytest.raises(ValueError, match="ASCII"):
        AsyncClient(api_key="line\nfeed")


async def test_what_waits_to_connect_when_the_client_is_closed_connects_no_more():
    connected = asyncio.Event()
    num_connections = 0

    async def script(server):
        nonlocal num_connections
        num_connections += 1
        connected.set()
        await server.wait_closed()

    async with scripted_server(script, hello=None) as url:
        client = AsyncClient(url)
        asking = [asyncio.create_task(client.chat("Hi!")) for _ in range(2)]
        await connected.wait()
        await client.close()
        results = await asyncio.gather(*asking, return_exceptions=True)
    assert [isinstance(result, HeadraceError) for result in results] == [True, True]
    assert (client._session, client._connections, num_connections) == (None, [], 1)
