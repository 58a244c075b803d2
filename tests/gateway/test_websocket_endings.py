"""How streams end before their time: cancelled, disconnected, unread, shut down."""

import asyncio
import socket

import orjson
import pytest

from fakes import FakeEngine
from gateway.connections import STREAM_CONNECTIONS, close_all
from gateway.generation import TextGenerator
from gateway.websocket import StreamConnection
from stream_app import RawStream, serve_streams, start, until

both_encodings = pytest.mark.parametrize("encoding", ["json", "msgpack"])

# FakeEngine answers "Hi!" (3 bytes) with the letters from chr(ord("a") + 3) on.
ANSWER = "defg"


# ---- cancelling --------------------------------------------------------------------------------


@both_encodings
async def test_cancel_ends_the_stream_with_the_usage_so_far_and_is_idempotent(encoding):
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway, gateway.connect(encoding) as stream:
        await stream.send(start("a", max_tokens=100))
        await stream.receive()
        engine.step(3)
        delta = await stream.receive()
        await stream.send({"type": "cancel", "id": "a"})
        await stream.send({"type": "cancel", "id": "a"})
        done = await stream.receive()
        await stream.send({"type": "ping", "t": 1})
        after = await stream.receive()
        if after["type"] == "error":  # the second cancel came after the end
            assert (after["error"]["code"], "id" in after) == ("unknown_id", False)
            after = await stream.receive()
    assert delta["text"] == "def"
    assert done["finish_reason"] == "cancelled"
    assert done["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 0}
    assert after["type"] == "pong"
    assert engine.num_aborts == 1
    assert engine.num_active == 0


async def test_cancel_while_the_prompt_is_tokenized_never_reaches_the_engine(monkeypatch):
    reached = asyncio.Event()

    async def never_prepared(self, request):
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(TextGenerator, "prepare", never_prepared)
    async with serve_streams() as gateway, gateway.connect() as stream:
        await stream.send(start("a"))
        await reached.wait()
        await stream.send({"type": "cancel", "id": "a"})
        done = await stream.receive()
        monkeypatch.undo()
        await stream.send(start("a"))
        assert (await stream.answer("a"))[0] == ANSWER
    assert (done["type"], done["finish_reason"], done["seq"]) == ("done", "cancelled", 0)
    assert done["usage"] == {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
    assert done["timing"]["ttft_s"] is None
    assert len(gateway.engine.submitted) == 1


async def test_cancelling_one_stream_leaves_its_neighbours_alone():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway, gateway.connect() as stream:
        for stream_id in "abc":
            await stream.send(start(stream_id))
            await stream.receive()
        await stream.send({"type": "cancel", "id": "b"})
        assert (await stream.receive())["finish_reason"] == "cancelled"
        engine.release()
        ends = {}
        texts = {"a": "", "c": ""}
        while len(ends) < 2:
            message = await stream.receive()
            if message["type"] == "delta":
                texts[message["id"]] += message["text"]
            else:
                ends[message["id"]] = message["finish_reason"]
    assert texts == {"a": ANSWER, "c": ANSWER}
    assert ends == {"a": "length", "c": "length"}


# ---- disconnects -------------------------------------------------------------------------------


def cut(stream: RawStream) -> None:
    """Break the connection without a close frame, as a crash does."""
    stream.ws._response.connection.transport.abort()


@pytest.mark.parametrize("handler_cancellation", [True, False])
@pytest.mark.parametrize("politely", [True, False])
@pytest.mark.parametrize("phase", ["preparing", "queued", "streaming", "last message waiting"])
async def test_a_disconnect_at_any_phase_aborts_at_once(
    phase, politely, handler_cancellation, monkeypatch
):
    engine = FakeEngine(max_num_seqs=1)
    engine.hold()
    reached = asyncio.Event()

    async def never_prepared(self, request):
        reached.set()
        await asyncio.Event().wait()

    if phase == "preparing":
        monkeypatch.setattr(TextGenerator, "prepare", never_prepared)
    async with (
        serve_streams(engine, handler_cancellation=handler_cancellation) as gateway,
        gateway.connect() as stream,
    ):
        await stream.send(start("a"))
        if phase == "preparing":
            await reached.wait()
        else:
            await engine.wait_for_requests(1)
        if phase in ("streaming", "last message waiting"):
            engine.step()
            await stream.receive()  # accepted
            assert (await stream.receive())["type"] == "delta"
        if phase == "last message waiting":
            engine.step(3)
        if politely:
            await stream.ws.close()
        else:
            cut(stream)
        await until(lambda: not gateway.app[STREAM_CONNECTIONS])
        assert engine.num_active == 0


async def test_a_disconnect_aborts_all_streams_of_the_connection_and_no_others():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway, gateway.connect() as other:
        async with gateway.connect() as stream:
            for n in range(10):
                await stream.send(start(f"s{n}"))
            await other.send(start("kept"))
            await engine.wait_for_requests(11)
            cut(stream)
            await engine.wait_until(lambda: engine.num_active == 1)
        engine.release()
        assert (await other.answer("kept"))[0] == ANSWER
    assert engine.num_aborts == 10


# ---- slow readers ------------------------------------------------------------------------------


FLOOD = {"ws_max_messages_per_s": 1e6}  # the deaf must be heard


class DeafClient:
    """A client that sends, and never reads a byte."""

    def __init__(self, gateway):
        self._gateway = gateway

    async def __aenter__(self):
        url = self._gateway.client.make_url("/v1/stream")
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (url.host, url.port))
        self._reader, self._writer = await asyncio.open_connection(sock=sock, limit=1024)
        self._writer.write(
            f"GET /v1/stream HTTP/1.1\r\nHost: {url.host}\r\nConnection: Upgrade\r\n"
            "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            "Sec-WebSocket-Protocol: headrace.v1.json\r\n\r\n".encode()
        )
        self._writer.transport.pause_reading()
        return self

    async def __aexit__(self, *exc_info):
        self._writer.transport.abort()

    def send(self, message):
        payload = orjson.dumps(message)
        assert len(payload) < 65536
        length = (
            bytes([0x80 | len(payload)])
            if len(payload) < 126
            else bytes([0x80 | 126]) + len(payload).to_bytes(2, "big")
        )
        # A mask of zeros leaves the payload as it is.
        self._writer.write(b"\x81" + length + bytes(4) + payload)

    def flood(self):
        """Make the server owe some megabytes of answers that nobody fetches."""
        for n in range(20_000):
            self.send({"type": "bogus", "n": n})


async def test_a_client_that_never_reads_is_closed_and_its_streams_aborted(caplog):
    engine = FakeEngine()
    engine.hold()
    caplog.set_level("INFO")
    async with (
        serve_streams(engine, send_timeout_s=0.2, ws_close_timeout_s=0.1, **FLOOD) as gateway,
        DeafClient(gateway) as deaf,
    ):
        deaf.send(start("a"))
        await engine.wait_for_requests(1)
        deaf.flood()
        await engine.wait_until_idle()
        await until(lambda: not gateway.app[STREAM_CONNECTIONS])
    assert "does not read" in caplog.text
    assert engine.num_aborts == 1


async def test_a_client_that_never_reads_holds_up_neither_the_engine_nor_other_clients():
    engine = FakeEngine(max_model_len=4096)
    engine.script_all("x" * 2000)
    async with (
        serve_streams(engine, ws_close_timeout_s=0.1, **FLOOD) as gateway,
        DeafClient(gateway) as deaf,
        gateway.connect() as stream,
    ):
        for n in range(20):
            deaf.send(start(f"s{n}", max_tokens=2000))
        deaf.flood()
        await engine.wait_for_requests(20)
        await stream.send(start("b", max_tokens=2000))
        text, done = await stream.answer("b")
        # The engine is through with all of them, though nobody has read them.
        await engine.wait_until_idle()
    assert (len(text), done["finish_reason"]) == (2000, "length")
    assert engine.generation_tokens == 21 * 2000


async def test_a_slow_reader_gets_merged_deltas_and_the_whole_text(monkeypatch):
    """While the writer is stuck, deltas merge; nothing is lost."""
    engine = FakeEngine(max_model_len=4096)
    engine.hold()
    may_send = asyncio.Event()
    send = StreamConnection._send

    async def gated(self, *args):
        await may_send.wait()
        await send(self, *args)

    async with serve_streams(engine) as gateway, gateway.connect() as stream:
        monkeypatch.setattr(StreamConnection, "_send", gated)
        await stream.send(start("a", max_tokens=1000))
        await engine.wait_for_requests(1)
        engine.release()
        await engine.wait_until_idle()
        may_send.set()
        assert (await stream.receive())["type"] == "accepted"
        delta, done = await stream.receive(), await stream.receive()
    assert (delta["seq"], len(delta["text"])) == (0, 1000)
    assert (done["type"], done["seq"]) == ("done", 1)


# ---- shutdown ----------------------------------------------------------------------------------


@both_encodings
async def test_at_shutdown_goaway_comes_then_an_end_for_each_stream_then_close_1012(encoding):
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway, gateway.connect(encoding) as stream:
        for stream_id in "ab":
            await stream.send(start(stream_id))
            await stream.receive()
        engine.step()
        for _ in "ab":
            await stream.receive()
        closing = asyncio.create_task(close_all(gateway.app))
        messages = [await stream.receive() for _ in range(3)]
        code = await stream.receive_close()
        await closing
        assert engine.num_active == 0
        assert gateway.app[STREAM_CONNECTIONS] == set()
    assert messages[0]["type"] == "goaway"
    assert messages[0]["retry_after_s"] > 0
    assert {(m["id"], m["type"], m["status"]) for m in messages[1:]} == {
        ("a", "error", 503),
        ("b", "error", 503),
    }
    assert code == 1012


async def test_shutdown_does_not_wait_for_a_client_that_never_reads():
    engine = FakeEngine(max_model_len=4096)
    async with (
        serve_streams(engine, ws_close_timeout_s=0.1, **FLOOD) as gateway,
        DeafClient(gateway) as deaf,
    ):
        deaf.send(start("a"))
        await engine.wait_for_requests(1)
        deaf.flood()
        await close_all(gateway.app)
    assert engine.num_active == 0
