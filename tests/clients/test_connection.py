"""One websocket, against servers that behave as well or as badly as a test wants."""

import asyncio
import socket
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from headrace_client.connection import Connection
from headrace_client.errors import (
    ConnectFailed,
    ConnectionLost,
    NotAllowed,
    Overloaded,
    ProtocolError,
    Unavailable,
)
from headrace_client.inbox import CREDITS, StreamInbox, TextDelta
from headrace_client.wire import ENCODINGS
from scripted_server import HELLO, delta, done, scripted_server


@asynccontextmanager
async def connected(
    base_url: str, encoding: str = "json", *, timeout_s: float | None = None, on_lost=None
):
    """Open a connection to the server at `base_url`, which ends in a slash, and close it."""
    async with aiohttp.ClientSession() as session:
        connection = await Connection.open(
            session,
            f"{base_url}v1/stream",
            ENCODINGS[encoding],
            timeout_s=timeout_s,
            on_lost=on_lost,
        )
        try:
            yield connection
        finally:
            await connection.close()


def ask(connection: Connection, prompt: str = "Hi!") -> StreamInbox:
    return connection.start({"prompt": prompt}, return_token_ids=False)


async def read(inbox: StreamInbox) -> str:
    """Read a stream to its end."""
    text = ""
    while (new := await inbox.take()) is not None:
        text += new.text
    return text


async def wait_closed(server) -> int | None:
    return await server.wait_closed()


# ---- connecting --------------------------------------------------------------------------------


async def test_an_open_connection_knows_what_the_server_said_first():
    async with scripted_server(wait_closed) as url, connected(url) as connection:
        assert connection.hello.model == "m"
        assert connection.takes_streams
        assert not connection.has_ended


async def test_no_server_is_connect_failed():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        with pytest.raises(ConnectFailed, match=r"no server answers .*: Connection refused$"):
            async with connected(url):
                pass


async def test_a_port_that_cannot_be_is_connect_failed():
    with pytest.raises(ConnectFailed, match="is not an address that can be connected to"):
        async with connected("http://127.0.0.1:99999/"):
            pass


async def test_a_server_that_is_not_ours_is_connect_failed():
    async with TestServer(web.Application()) as server:
        with pytest.raises(ConnectFailed, match="HTTP 404"):
            async with connected(str(server.make_url("/"))):
                pass


async def test_a_server_that_does_not_speak_the_encoding_is_connect_failed():
    async with scripted_server(wait_closed) as url:
        with pytest.raises(ConnectFailed, match=r"does not speak headrace\.v1\.msgpack"):
            async with connected(url, "msgpack"):
                pass


@pytest.mark.parametrize(
    "hello", [{**HELLO, "version": 2}, {"type": "pong", "t": 1}, {"type": "hello"}, [], {}]
)
async def test_a_first_message_that_is_no_hello_of_version_1_is_connect_failed(hello):
    async with scripted_server(wait_closed, hello=hello) as url:
        with pytest.raises(ConnectFailed):
            async with connected(url):
                pass


async def test_a_server_that_closes_without_a_hello_is_connect_failed():
    async def script(server):
        await server.ws.close()

    async with scripted_server(script, hello=None) as url:
        with pytest.raises(ConnectFailed, match="without a hello"):
            async with connected(url):
                pass


@pytest.mark.parametrize(
    ("status", "headers", "kind", "retry_after_s"),
    [
        (503, {"Retry-After": "7"}, Unavailable, 7.0),
        (429, {"Retry-After": "0"}, Overloaded, 0.0),
        (503, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, Unavailable, None),
        (503, {}, Unavailable, None),
    ],
)
async def test_a_server_that_takes_no_connections_says_when_it_will(
    status, headers, kind, retry_after_s
):
    async def refuse(request):
        return web.Response(status=status, headers=headers)

    app = web.Application()
    app.router.add_get("/v1/stream", refuse)
    async with TestServer(app) as server:
        with pytest.raises(kind) as error:
            async with connected(str(server.make_url("/"))):
                pass
    assert (error.value.status, error.value.retry_after_s) == (status, retry_after_s)


@pytest.mark.parametrize("status", [401, 403])
async def test_a_server_that_wants_a_key_says_so(status):
    async def refuse(request):
        return web.Response(status=status)

    app = web.Application()
    app.router.add_get("/v1/stream", refuse)
    async with TestServer(app) as server:
        with pytest.raises(NotAllowed, match="API key") as error:
            async with connected(str(server.make_url("/"))):
                pass
    assert error.value.status == status


# ---- streams that share it ---------------------------------------------------------------------


async def test_each_stream_gets_its_own_messages():
    async def script(server):
        first, second = await server.receive(), await server.receive()
        stream = {"credits": CREDITS}
        assert first == {
            "type": "start",
            "id": "s1",
            "request": {"prompt": "a"},
            "stream": stream,
        }
        assert second["request"] == {"prompt": "b"}
        await server.send(
            delta("s2", 0, "u"), delta("s1", 0, "x"), delta("s2", 1, "v"), delta("s1", 1, "y")
        )
        await server.send(done("s1", 2), delta("s2", 2, "w"), done("s2", 3))
        await server.wait_closed()

    async with scripted_server(script) as url, connected(url) as connection:
        first, second = ask(connection, "a"), ask(connection, "b")
        assert await read(first) == "xy"
        assert await read(second) == "uvw"
        assert connection.takes_streams


async def test_a_stream_that_nobody_reads_holds_up_no_other():
    async def script(server):
        stream_id = await server.accept()
        deltas = (delta(stream_id, n, "x") for n in range(CREDITS))
        await server.send(*deltas, done(stream_id, CREDITS))
        await server.send(done(await server.accept(), 0))
        await server.wait_closed()

    async with scripted_server(script) as url, connected(url) as connection:
        unread, other = ask(connection), ask(connection)
        assert await read(other) == ""
        assert await unread.take() == TextDelta(text="x" * CREDITS)


async def test_only_a_stream_that_is_open_can_be_cancelled():
    async def script(server):
        await server.send(done(await server.accept(), 0))
        await server.accept()
        assert await server.receive() == {"type": "cancel", "id": "s2"}
        await server.send(done("s2", 0, finish_reason="cancelled"))
        await server.wait_closed()

    async with scripted_server(script) as url, connected(url) as connection:
        ended = ask(connection)
        assert await read(ended) == ""
        connection.cancel(ended.stream_id)
        connection.cancel("stranger")
        cancelled = ask(connection)
        connection.cancel(cancelled.stream_id)
        assert await read(cancelled) == ""


async def test_a_request_that_cannot_be_encoded_leaves_the_connection_as_it_was():
    async def script(server):
        await server.send(done(await server.accept(), 0))
        await server.wait_closed()

    async with scripted_server(script) as url, connected(url) as connection:
        with pytest.raises(TypeError):
            connection.start({"stop": {1, 2}}, return_token_ids=False)
        assert await read(ask(connection)) == ""


async def test_what_concerns_no_stream_is_ignored():
    async def script(server):
        stream_id = await server.accept()
        crossed = {"message": "no", "type": "not_found_error", "code": "unknown_id"}
        await server.send(
            {"type": "news", "id": stream_id},
            {"type": "pong", "t": 1},
            {"type": "error", "error": crossed, "status": 404},
            delta(stream_id, 0, "x"),
            done(stream_id, 1),
        )
        await server.wait_closed()

    async with scripted_server(script) as url, connected(url) as connection:
        assert await read(ask(connection)) == "x"


# ---- its end -----------------------------------------------------------------------------------


async def test_a_lost_connection_fails_all_open_streams_once():
    async def script(server):
        ended, half, _ = [await server.accept() for _ in range(3)]
        await server.send(delta(ended, 0, "all"), done(ended, 1), delta(half, 0, "half"))
        await server.ws.close(code=1011)

    async with scripted_server(script) as url, connected(url) as connection:
        ended, half, silent = (ask(connection) for _ in range(3))
        with pytest.raises(ConnectionLost) as error:
            await silent.take()
        assert (error.value.code, error.value.retry_after_s) == (1011, None)
        assert connection.has_ended
        assert not connection.takes_streams
        await connection.close()  # the first reason stays
        # What arrived before can still be read.
        assert await read(ended) == "all"
        assert await half.take() == TextDelta(text="half")
        with pytest.raises(ConnectionLost, match="the connection to the server was lost"):
            await half.take()


async def test_after_goaway_open_streams_go_on_and_no_new_ones_are_taken():
    may_close = asyncio.Event()

    async def script(server):
        stream_id = await server.accept()
        await server.send({"type": "goaway", "reason": "restart", "retry_after_s": 2})
        await server.send(delta(stream_id, 0, "old"))
        await may_close.wait()
        await server.ws.close(code=1012)

    async with scripted_server(script) as url, connected(url) as connection:
        inbox = ask(connection)
        assert await inbox.take() == TextDelta(text="old")
        assert (connection.takes_streams, connection.has_ended) == (False, False)
        may_close.set()
        with pytest.raises(ConnectionLost, match="restart") as error:
            await inbox.take()
    assert (error.value.code, error.value.retry_after_s) == (1012, 2)


async def test_closing_ends_the_open_streams_and_says_goodbye():
    codes = []

    async def script(server):
        codes.append(await server.wait_closed())

    async with scripted_server(script) as url, connected(url) as connection:
        inbox = ask(connection)
        await connection.close()
        await connection.close()
        connection.cancel(inbox.stream_id)
        with pytest.raises(ConnectionLost, match="the client was closed"):
            await inbox.take()
        assert connection.has_ended
    assert codes == [1000]


# ---- servers that break the protocol -----------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        delta("s1", 1, "x"),
        delta("stranger", 0, "x"),
        {"type": "delta", "id": "s1", "seq": "0", "text": "x"},
        ["delta"],
        {"type": "error", "error": {"message": "no", "type": "t"}, "status": 400},
    ],
)
async def test_a_broken_rule_fails_every_stream_and_closes_with_1002(message):
    codes = []

    async def script(server):
        await server.accept()
        await server.accept()
        await server.send(message)
        codes.append(await server.wait_closed())

    async with scripted_server(script) as url, connected(url) as connection:
        for inbox in (ask(connection), ask(connection)):
            with pytest.raises(ProtocolError):
                await inbox.take()
    assert codes == [1002]


async def test_a_message_after_the_end_of_its_stream_breaks_the_protocol():
    async def script(server):
        ended, _ = await server.accept(), await server.accept()
        await server.send(done(ended, 0), delta(ended, 0, "late"))
        await server.wait_closed()

    async with scripted_server(script) as url, connected(url) as connection:
        ended, other = ask(connection), ask(connection)
        assert await read(ended) == ""
        with pytest.raises(ProtocolError, match="no open stream"):
            await other.take()


# ---- streams that go on elsewhere --------------------------------------------------------------


async def test_a_lost_connection_hands_over_what_can_be_resumed_and_fails_the_rest():
    async def script(server):
        for token in ("secret", None):
            message = await server.receive()
            assert message["stream"] == {"credits": CREDITS, "resumable": True}
            accepted = {"type": "accepted", "id": message["id"], "request_id": "r"}
            await server.send({**accepted, "prompt_tokens": 1, "resume_token": token})
        await server.send(delta("s1", 0, "one"), delta("s1", 1, "two"))
        server.ws._req.transport.abort()

    async def script_of_the_next(server):
        assert await server.receive() == {
            "type": "resume",
            "id": "s1",
            "token": "secret",
            "after": 1,
            "credits": CREDITS,
        }
        assert await server.receive() == {"type": "cancel", "id": "s1"}
        await server.send({"type": "resumed", "id": "s1", "request_id": "r"})
        await server.send(delta("s1", 4, "three"), done("s1", 5, finish_reason="cancelled"))
        await server.wait_closed()

    handed_over = asyncio.Queue()
    async with (
        scripted_server(script) as url,
        connected(url, on_lost=lambda inboxes, error: handed_over.put_nowait(inboxes)) as first,
    ):
        kept, other = ask(first), ask(first)
        [inbox] = await handed_over.get()
        assert inbox is kept
        with pytest.raises(ConnectionLost):
            await other.take()
    async with scripted_server(script_of_the_next) as url, connected(url) as second:
        inbox.is_cancelled = True
        second.resume(inbox)
        assert second.carries(inbox)
        assert not first.carries(inbox)
        assert await read(inbox) == "onetwothree"
        assert inbox.num_resumes == 1


async def test_credit_is_sent_as_the_reader_takes_and_not_before():
    async def script(server):
        stream_id = await server.accept()
        await server.send(*(delta(stream_id, n, "x") for n in range(CREDITS)))
        assert await server.receive() == {"type": "credit", "id": "s1", "n": CREDITS}
        await server.send(done(stream_id, CREDITS))
        await server.wait_closed()

    async with scripted_server(script) as url, connected(url) as connection:
        inbox = ask(connection)
        while inbox.last_seq < CREDITS - 1:
            await asyncio.sleep(0)
        assert await read(inbox) == "x" * CREDITS
