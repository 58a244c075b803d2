"""The native stream protocol against a FakeEngine, over real sockets."""

import asyncio
import socket

import msgpack
import orjson
import pytest
from aiohttp import WSMsgType, web

from fakes import FakeEngine
from gateway.app_keys import METRICS
from gateway.generation import TextGenerator
from gateway.websocket import MAX_BAD_FRAMES, STREAM_CONNECTIONS, close_all
from stream_app import MODEL, RawStream, serve_streams, start

both_encodings = pytest.mark.parametrize("encoding", ["json", "msgpack"])

# FakeEngine answers "Hi!" (3 bytes) with the letters from chr(ord("a") + 3) on.
ANSWER = "defg"


# ---- a stream that goes well -------------------------------------------------------------------


@both_encodings
async def test_a_stream_is_accepted_then_streamed_then_done(encoding):
    async with serve_streams() as gateway, gateway.connect(encoding) as stream:
        await stream.send(start("a"))
        accepted = await stream.receive()
        text, done = await stream.answer("a")
    assert accepted == {"type": "accepted", "id": "a", "request_id": "r0", "prompt_tokens": 3}
    assert text == ANSWER
    assert done["type"] == "done"
    assert done["finish_reason"] == "length"
    assert done["stop_reason"] is None
    assert done["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "cached_tokens": 0}
    # The fake's clock moves 10 ms a step, and the first step starts when the request arrives.
    timing = done["timing"]
    assert timing["queue_s"] == pytest.approx(0.0)
    assert timing["ttft_s"] == pytest.approx(0.01)
    assert timing["e2e_s"] == pytest.approx(0.04)
    for name in ("itl_mean_s", "itl_p50_s", "itl_p99_s", "itl_max_s"):
        assert timing[name] == pytest.approx(0.01)


@both_encodings
async def test_deltas_are_numbered_from_zero_and_done_carries_the_next_number(encoding):
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway, gateway.connect(encoding) as stream:
        await stream.send(start("a"))
        assert (await stream.receive())["type"] == "accepted"
        received = []
        for _ in range(4):
            engine.step()
            received.append(await stream.receive())
        done = await stream.receive()
    assert [(m["seq"], m["text"]) for m in received] == list(enumerate(ANSWER))
    assert done["seq"] == 4


@both_encodings
async def test_token_ids_come_when_asked_for_and_only_then(encoding):
    async with serve_streams() as gateway, gateway.connect(encoding) as stream:
        await stream.send({**start("a"), "return_token_ids": True})
        await stream.send(start("b"))
        ids: dict[str, list[int]] = {"a": [], "b": []}
        ended = set()
        while ended != {"a", "b"}:
            message = await stream.receive()
            if message["type"] == "delta":
                ids[message["id"]] += message.get("token_ids", [])
            elif message["type"] == "done":
                ended.add(message["id"])
    assert ids == {"a": list(ANSWER.encode()), "b": []}


async def test_messages_go_through_the_chat_template():
    async with serve_streams() as gateway, gateway.connect() as stream:
        request = {"messages": [{"role": "user", "content": "Hi!"}], "max_tokens": 1}
        await stream.send({"type": "start", "id": "a", "request": request})
        accepted = await stream.receive()
        await stream.answer("a")
    # <|im_start|> user \n Hi! <|im_end|> \n and <|im_start|> assistant \n
    assert accepted["prompt_tokens"] == (4 + 4 + 3) + 11


async def test_every_option_reaches_the_engine():
    async with serve_streams() as gateway, gateway.connect() as stream:
        request = {
            "prompt": [72, 105],
            "model": MODEL,
            "max_tokens": 7,
            "min_tokens": 2,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 11,
            "min_p": 0.1,
            "seed": -5,
            "stop_token_ids": [3],
            "ignore_eos": True,
            "cache_salt": "salt",
            "stop": None,
        }
        await stream.send({"type": "start", "id": "a", "request": request})
        await stream.answer("a")
        prompt, params = gateway.engine.submitted[0]
    assert prompt == (72, 105)
    assert gateway.engine.salts == ["salt"]
    assert (params.max_tokens, params.min_tokens, params.top_k, params.seed) == (7, 2, 11, -5)
    assert (params.temperature, params.top_p, params.min_p) == (0.5, 0.9, 0.1)
    assert (params.stop_token_ids, params.ignore_eos) == ((3,), True)


async def test_a_stop_string_ends_the_answer_and_is_told():
    async with serve_streams() as gateway, gateway.connect() as stream:
        await stream.send(start("a", max_tokens=20, stop="fg"))
        text, done = await stream.answer("a")
        await gateway.engine.wait_until_idle()
    assert text == "de"
    assert (done["finish_reason"], done["stop_reason"]) == ("stop", "fg")


async def test_many_streams_share_a_connection_and_keep_apart():
    async with serve_streams() as gateway, gateway.connect() as stream:
        prompts = {f"s{n}": "x" * (n + 1) for n in range(20)}
        for stream_id, prompt in prompts.items():
            await stream.send(start(stream_id, prompt, max_tokens=3))
        texts = dict.fromkeys(prompts, "")
        num_done = 0
        while num_done < len(prompts):
            message = await stream.receive()
            if message["type"] == "delta":
                texts[message["id"]] += message["text"]
            num_done += message["type"] == "done"
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    assert texts == {f"s{n}": alphabet[n + 1 : n + 4] for n in range(20)}


async def test_an_id_can_be_used_again_after_its_last_message():
    async with serve_streams() as gateway, gateway.connect() as stream:
        for _ in range(5):
            await stream.send(start("same"))
            assert (await stream.answer("same"))[0] == ANSWER


# ---- the handshake -----------------------------------------------------------------------------


@pytest.mark.parametrize("protocols", [[], ["graphql-ws"], ["headrace.v2.json"]])
async def test_without_a_known_subprotocol_the_upgrade_is_refused(protocols):
    headers = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Protocol": ", ".join(protocols),
    }
    async with serve_streams() as gateway:
        response = await gateway.client.get("/v1/stream", headers=headers)
        body = await response.json()
    assert response.status == 400
    assert "headrace.v1.json" in body["error"]["message"]


async def test_a_plain_get_is_told_that_this_is_a_websocket():
    async with serve_streams() as gateway:
        response = await gateway.client.get("/v1/stream")
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "upgrade_required"


async def test_the_first_known_subprotocol_that_is_offered_is_taken():
    async with serve_streams() as gateway:
        offered = ["x.v1", "headrace.v1.msgpack", "headrace.v1.json"]
        async with gateway.client.ws_connect("/v1/stream", protocols=offered) as ws:
            assert ws.protocol == "headrace.v1.msgpack"
            hello = msgpack.unpackb((await ws.receive()).data)
    assert hello["model"] == MODEL
    assert hello["limits"] == {
        "max_model_len": 1024,
        "max_streams": 32,
        "max_message_bytes": 8 * 1024 * 1024,
    }


async def test_connections_beyond_the_limit_get_503():
    async with serve_streams(ws_max_connections=1) as gateway, gateway.connect():
        response = await gateway.client.get(
            "/v1/stream",
            headers={"Upgrade": "websocket", "Sec-WebSocket-Protocol": "headrace.v1.json"},
        )
        assert response.status == 503
        assert response.headers["Retry-After"]


async def test_the_number_of_open_websockets_is_a_metric():
    async with serve_streams() as gateway:
        name = f'headrace_websockets_open{{model_name="{MODEL}"}}'.encode()
        async with gateway.connect():
            assert name + b" 1.0" in gateway.app[METRICS].render()[0]
        await until(lambda: not gateway.app[STREAM_CONNECTIONS])
        assert name + b" 0.0" in gateway.app[METRICS].render()[0]


# ---- refusals ----------------------------------------------------------------------------------


@both_encodings
@pytest.mark.parametrize(
    ("request_fields", "param"),
    [
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "top_p": 0}, "top_p"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens"),
        ({"prompt": "x", "stop": ["a", 1]}, "stop[1]"),
        ({"prompt": "x", "stop": ["s"] * 500}, "stop"),
        ({"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"prompt": "x", "model": "other"}, "model"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": "x" * 2000}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "x", "messages": []}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ],
)
async def test_a_bad_request_ends_its_stream_and_names_the_field(encoding, request_fields, param):
    async with serve_streams() as gateway, gateway.connect(encoding) as stream:
        await stream.send({"type": "start", "id": "bad", "request": request_fields})
        error = await stream.receive()
        await stream.send(start("good"))
        assert (await stream.answer("good"))[0] == ANSWER
    assert error["type"] == "error"
    assert error["id"] == "bad"
    assert error["status"] == (404 if param == "model" else 400)
    assert error["error"]["param"] == param


async def test_nan_in_msgpack_is_refused_like_any_other_bad_value():
    async with serve_streams() as gateway, gateway.connect("msgpack") as stream:
        await stream.send(start("a", temperature=float("nan")))
        error = await stream.receive()
    assert (error["id"], error["status"]) == ("a", 400)
    assert error["error"]["param"] == "temperature"


async def test_an_id_in_use_refuses_the_new_start_and_not_the_old_stream():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway, gateway.connect() as stream:
        await stream.send(start("a"))
        assert (await stream.receive())["type"] == "accepted"
        await stream.send(start("a", "another"))
        error = await stream.receive()
        # So does a start that is wrong in another way: its id is not its own.
        await stream.send(start("a", temperature="hot"))
        second = await stream.receive()
        engine.release()
        assert (await stream.answer("a"))[0] == ANSWER
    assert "id" not in error
    assert error["error"]["code"] == "id_in_use"
    assert "id" not in second


async def test_too_many_streams_refuse_the_next_with_429():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine, ws_max_streams=2) as gateway, gateway.connect() as stream:
        for stream_id in "abc":
            await stream.send(start(stream_id))
        messages = [await stream.receive() for _ in range(3)]
        engine.release()
        refused = [m for m in messages if m["type"] == "error"]
        assert [m["id"] for m in refused] == ["c"]
        assert refused[0]["status"] == 429
        assert refused[0]["retry_after_s"] > 0


async def test_a_full_engine_queue_is_429_with_a_time_to_retry_after():
    engine = FakeEngine(max_num_seqs=1, max_num_queued_requests=1)
    engine.hold()
    async with serve_streams(engine) as gateway, gateway.connect() as stream:
        await stream.send(start("a"))
        await stream.receive()
        await stream.send(start("b"))
        error = await stream.receive()
    assert (error["id"], error["status"], error["retry_after_s"]) == ("b", 429, 3.0)


async def test_an_engine_failure_ends_the_stream_with_an_error():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway, gateway.connect() as stream:
        await stream.send(start("a"))
        await stream.receive()
        engine.step()
        assert (await stream.receive())["text"] == "d"
        engine.fail_requests("the step failed")
        error = await stream.receive()
        engine.release()
        await stream.send(start("b"))
        assert (await stream.answer("b"))[0] == ANSWER
    assert (error["id"], error["status"]) == ("a", 500)
    assert error["error"]["message"] == "the step failed"


async def test_a_bug_in_the_server_fails_the_stream_and_tells_nothing(monkeypatch, caplog):
    async def explode(self, request):
        raise RuntimeError("secret at /etc/passwd")

    async with serve_streams() as gateway, gateway.connect() as stream:
        monkeypatch.setattr(TextGenerator, "prepare", explode)
        await stream.send(start("a"))
        error = await stream.receive()
        monkeypatch.undo()
        await stream.send(start("b"))
        assert (await stream.answer("b"))[0] == ANSWER
    assert (error["id"], error["status"]) == ("a", 500)
    assert "secret" not in error["error"]["message"]
    assert "secret" in caplog.text


# ---- frames that are no messages ---------------------------------------------------------------

BAD_JSON = [b"", b"{", b"[]", b"3", b'"x"', b"nul", b"\xff\xfe", b'{"a":1e999}', b"[" * 20000]
BAD_MSGPACK = [
    b"",
    b"\xc1",
    b"\x90",
    msgpack.packb({1: 2}),
    msgpack.packb({"type": msgpack.ExtType(4, b"x")}),
    b"\x81" * 3000,
    b"\xdf\xff\xff\xff\xff",
    msgpack.packb({"type": "ping", "t": 1}) + b"\x01",
    b"\x81\xa4type\xa3\xed\xa0\x80",  # a lone surrogate
]


@pytest.mark.parametrize(
    ("encoding", "frame"),
    [("json", f) for f in BAD_JSON] + [("msgpack", f) for f in BAD_MSGPACK],
)
async def test_a_frame_that_cannot_be_decoded_gets_an_error_and_nothing_else_happens(
    encoding, frame
):
    async with serve_streams() as gateway, gateway.connect(encoding) as stream:
        await stream.send_raw(frame)
        error = await stream.receive()
        await stream.send(start("a"))
        assert (await stream.answer("a"))[0] == ANSWER
    assert "id" not in error
    assert (error["status"], error["error"]["code"]) == (400, "invalid_frame")


async def test_a_lone_surrogate_in_json_is_refused():
    async with serve_streams() as gateway, gateway.connect() as stream:
        await stream.send_raw(b'{"type":"start","id":"a","request":{"prompt":"\\ud800"}}')
        assert (await stream.receive())["error"]["code"] == "invalid_frame"


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ({}, "type", "unknown_type"),
        ({"type": 3}, "type", "unknown_type"),
        ({"type": "credit", "id": "a", "n": 3}, "type", "unknown_type"),
        ({"type": "start", "request": {"prompt": "x"}}, "id", "invalid_message"),
        ({"type": "start", "id": "", "request": {"prompt": "x"}}, "id", "invalid_message"),
        ({"type": "start", "id": "a b", "request": {"prompt": "x"}}, "id", "invalid_message"),
        ({"type": "start", "id": "a\n", "request": {"prompt": "x"}}, "id", "invalid_message"),
        ({"type": "start", "id": "x" * 129, "request": {"prompt": "x"}}, "id", "invalid_message"),
        ({"type": "cancel"}, "id", "invalid_message"),
        ({"type": "cancel", "id": "nobody"}, "id", "unknown_id"),
        ({"type": "ping"}, "t", "invalid_message"),
        ({"type": "ping", "t": "now"}, "t", "invalid_message"),
        ({"type": "ping", "t": -1}, "t", "invalid_message"),
    ],
)
@both_encodings
async def test_a_message_that_starts_no_stream_gets_an_error_without_id(
    encoding, message, param, code
):
    async with serve_streams() as gateway, gateway.connect(encoding) as stream:
        await stream.send(message)
        error = await stream.receive()
    assert "id" not in error
    assert (error["error"]["param"], error["error"]["code"]) == (param, code)


async def test_unknown_fields_are_ignored():
    async with serve_streams() as gateway, gateway.connect() as stream:
        await stream.send({**start("a", new_option={"deep": [1]}), "credits": 64})
        assert (await stream.answer("a"))[0] == ANSWER


async def test_the_wrong_kind_of_frame_is_an_error():
    async with serve_streams() as gateway, gateway.connect("json") as stream:
        await stream.ws.send_frame(orjson.dumps(start("a")), WSMsgType.BINARY)
        error = await stream.receive()
    assert error["error"]["code"] == "invalid_frame"
    assert "text frames" in error["error"]["message"]


async def test_frames_that_stay_undecodable_close_the_connection_with_1007():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway, gateway.connect() as stream:
        await stream.send(start("a"))
        await stream.receive()
        for _ in range(MAX_BAD_FRAMES - 1):
            await stream.send_raw(b"{")
        await stream.send({"type": "ping", "t": 1})  # in between, a good one: counted anew
        for _ in range(MAX_BAD_FRAMES):
            await stream.send_raw(b"{")
        messages = [await stream.receive() for _ in range(2 * MAX_BAD_FRAMES)]
        assert sum(m["type"] == "error" for m in messages) == 2 * MAX_BAD_FRAMES - 1
        assert await stream.receive_close() == 1007
        await engine.wait_until_idle()


async def test_a_message_that_is_too_large_closes_the_connection_with_1009():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine, max_body_bytes=4096) as gateway, gateway.connect() as stream:
        await stream.send(start("a"))
        await stream.receive()
        await stream.send(start("b", "x" * 5000))
        assert await stream.receive_close() == 1009
        await engine.wait_until_idle()


@both_encodings
async def test_a_ping_is_answered_with_the_same_number(encoding):
    async with serve_streams() as gateway, gateway.connect(encoding) as stream:
        for t in (0, 7, 1767225600.25):
            await stream.send({"type": "ping", "t": t})
            assert await stream.receive() == {"type": "pong", "t": t}


async def test_a_websocket_ping_is_answered_with_its_payload():
    async with serve_streams() as gateway, gateway.connect(autoping=False) as stream:
        await stream.ws.ping(b"hello")
        frame = await stream.ws.receive()
    assert (frame.type, bytes(frame.data)) == (WSMsgType.PONG, b"hello")


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


async def until(condition):
    """Give the event loop turns until the condition holds; the test's own time limit ends it."""
    while not condition():
        await asyncio.sleep(0)


def cut(stream: RawStream) -> None:
    """Break the connection without a close frame, as a crash does."""
    stream.ws._response.connection.transport.abort()


@pytest.mark.parametrize("politely", [True, False])
@pytest.mark.parametrize("phase", ["preparing", "queued", "streaming", "last message waiting"])
async def test_a_disconnect_at_any_phase_aborts_at_once(phase, politely, monkeypatch):
    engine = FakeEngine(max_num_seqs=1)
    engine.hold()
    reached = asyncio.Event()

    async def never_prepared(self, request):
        reached.set()
        await asyncio.Event().wait()

    if phase == "preparing":
        monkeypatch.setattr(TextGenerator, "prepare", never_prepared)
    async with serve_streams(engine) as gateway:
        async with gateway.connect() as stream:
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
    async with serve_streams(engine, send_timeout_s=0.2, ws_close_timeout_s=0.1) as gateway:
        async with DeafClient(gateway) as deaf:
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
    async with serve_streams(engine, ws_close_timeout_s=0.1) as gateway:
        async with DeafClient(gateway) as deaf, gateway.connect() as stream:
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
    send_frame = web.WebSocketResponse.send_frame

    async def gated(self, *args):
        await may_send.wait()
        await send_frame(self, *args)

    async with serve_streams(engine) as gateway, gateway.connect() as stream:
        monkeypatch.setattr(web.WebSocketResponse, "send_frame", gated)
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
        serve_streams(engine, ws_close_timeout_s=0.1) as gateway,
        DeafClient(gateway) as deaf,
    ):
        deaf.send(start("a"))
        await engine.wait_for_requests(1)
        deaf.flood()
        await close_all(gateway.app)
    assert engine.num_active == 0
