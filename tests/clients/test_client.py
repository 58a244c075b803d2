"""AsyncClient against the real gateway on a FakeEngine, and against servers that misbehave."""

import asyncio
import socket

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from fakes import FakeEngine
from headrace_client import (
    AsyncClient,
    BadRequest,
    ConnectFailed,
    ConnectionLost,
    ConnectTimeout,
    ModelNotFound,
    Overloaded,
    ProtocolError,
    Timeouts,
    Unavailable,
)
from scripted_server import HELLO, delta, done, scripted_server
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
    assert gateway.engine.salts == ["salt"]


async def test_many_streams_share_one_socket():
    async with serve_streams() as gateway, AsyncClient(gateway.base_url) as client:

        async def ask(n):
            return await (await client.complete("x" * n, max_tokens=2)).text()

        texts = await asyncio.gather(*(ask(n) for n in range(1, 24)))
        connections = gateway.engine.submitted
        assert len(connections) == 23
        hellos = {id(await client.hello()) for _ in range(3)}
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    assert texts == [alphabet[n : n + 2] for n in range(1, 24)]
    assert len(hellos) == 1


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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_a_number_that_is_not_finite_is_a_value_error(value):
    async with AsyncClient("http://127.0.0.1:1") as client:
        with pytest.raises(ValueError, match="temperature"):
            await client.chat("Hi!", temperature=value)


@both_encodings
@pytest.mark.parametrize("options", [{"seed": 2**70}, {"stop": {1, 2}}])
async def test_a_value_that_cannot_be_sent_is_a_local_error(encoding, options):
    async with (
        serve_streams() as gateway,
        AsyncClient(gateway.base_url, encoding=encoding) as client,
    ):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            await client.chat("Hi!", **options)
        assert await (await client.complete("Hi!", max_tokens=4)).text() == ANSWER


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
    async with serve_streams(engine) as gateway, AsyncClient(gateway.base_url) as client:
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
    async with serve_streams(engine) as gateway, AsyncClient(gateway.base_url) as client:
        with pytest.raises(Unavailable) as error:
            await client.chat("Hi!")
    assert (error.value.status, error.value.retry_after_s) == (503, 5.0)


# ---- connecting --------------------------------------------------------------------------------


async def test_no_server_is_connect_failed():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        async with AsyncClient(f"http://127.0.0.1:{port}") as client:
            with pytest.raises(ConnectFailed, match=r"no server answers .*: Connection refused$"):
                await client.chat("Hi!")


async def test_a_port_that_cannot_be_is_connect_failed():
    async with AsyncClient("http://127.0.0.1:99999") as client:
        with pytest.raises(ConnectFailed, match="is not an address that can be connected to"):
            await client.chat("Hi!")


async def test_a_server_that_is_not_ours_is_connect_failed():
    async with (
        TestServer(web.Application()) as server,
        AsyncClient(str(server.make_url("/"))) as client,
    ):
        with pytest.raises(ConnectFailed, match="HTTP 404"):
            await client.chat("Hi!")


@pytest.mark.parametrize(
    "hello", [{**HELLO, "version": 2}, {"type": "pong", "t": 1}, {"type": "hello"}, [], {}]
)
async def test_a_first_message_that_is_no_hello_of_version_1_is_connect_failed(hello):
    async def script(server):
        await server.wait_closed()

    async with scripted_server(script, hello=hello) as url, AsyncClient(url) as client:
        with pytest.raises(ConnectFailed):
            await client.chat("Hi!")


async def test_a_server_that_says_nothing_is_connect_timeout():
    async def script(server):
        await server.wait_closed()

    async with (
        scripted_server(script, hello=None) as url,
        AsyncClient(url, timeout=Timeouts(connect_s=0.05)) as client,
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


async def test_what_arrived_before_the_connection_broke_can_still_be_read():
    async def script(server):
        stream_id = await server.accept()
        await server.send(delta(stream_id, 0, "half"), delta(stream_id, 1, " more"))
        await server.ws.close(code=1011)

    async with scripted_server(script) as url, AsyncClient(url) as client:
        stream = await client.chat("Hi!")
        await until(lambda: stream._inbox.has_ended)
        assert (await anext(stream)).text == "half more"
        with pytest.raises(ConnectionLost) as error:
            await anext(stream)
    assert error.value.code == 1011


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
        with pytest.raises(ConnectionLost, match="restart") as error:
            await anext(first)
    assert (error.value.code, error.value.retry_after_s) == (1012, 2)
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


# ---- servers that break the protocol -----------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        lambda i: [delta(i, 1, "x")],
        lambda i: [delta(i, 0, "x"), delta(i, 0, "x")],
        lambda i: [done(i, 3)],
        lambda i: [delta("stranger", 0, "x")],
        lambda i: [{"type": "accepted", "id": i, "request_id": "r", "prompt_tokens": 1}],
        lambda i: [{"type": "delta", "id": i, "seq": "0", "text": "x"}],
        lambda i: [{"type": "done", "id": i, "seq": 0}],
        lambda i: [{"type": "delta", "id": i, "seq": 0, "text": "x", "token_ids": 3}],
        lambda i: [["delta"]],
    ],
)
async def test_a_broken_rule_is_a_protocol_error_and_closes_with_1002(messages):
    codes = []

    async def script(server):
        stream_id = await server.accept()
        await server.send(*messages(stream_id))
        codes.append(await server.wait_closed())

    async with scripted_server(script) as url, AsyncClient(url) as client:
        stream = await client.chat("Hi!")
        with pytest.raises(ProtocolError):
            await stream.text()
    assert codes == [1002]


async def test_a_message_after_the_end_of_its_stream_is_a_protocol_error():
    async def script(server):
        first, second = await server.accept(), await server.accept()
        await server.send(done(first, 0), delta(first, 0, "late"))
        assert second
        await server.wait_closed()

    async with scripted_server(script) as url, AsyncClient(url) as client:
        await client.chat("Hi!")
        second = await client.chat("Hi!")
        with pytest.raises(ProtocolError):
            await second.text()


async def test_types_and_fields_of_the_future_are_ignored():
    async def script(server):
        stream_id = await server.accept()
        await server.send(
            {"type": "news", "id": stream_id},
            {**delta(stream_id, 0, "x"), "logprobs": []},
            done(stream_id, 1, future=1),
        )
        await server.wait_closed()

    async with scripted_server(script) as url, AsyncClient(url) as client:
        assert await (await client.chat("Hi!")).text() == "x"
