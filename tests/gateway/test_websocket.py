"""Streams over the native protocol: answers, the handshake, refused requests."""

import msgpack
import pytest
from aiohttp import WSServerHandshakeError

from fakes import FakeEngine
from gateway.app_keys import METRICS
from gateway.connections import STREAM_CONNECTIONS
from gateway.generation import TextGenerator
from stream_app import MODEL, serve_streams, start, until

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


@both_encodings
async def test_log_probabilities_come_when_asked_for_one_for_each_token(encoding):
    """FakeEngine says -id/1000, and that the next token was likelier by a half."""
    async with serve_streams() as gateway, gateway.connect(encoding) as stream:
        await stream.send(start("a", logprobs=1))
        entries, message = [], {}
        while message.get("type") != "done":
            message = await stream.receive()
            entries += message.get("logprobs", [])
            assert "token_ids" not in message
    assert [entry["logprob"] for entry in entries] == [-0.1, -0.101, -0.102, -0.103]
    assert "".join(entry["token"] for entry in entries) == ANSWER
    assert entries[0]["bytes"] == [100]
    assert entries[0]["top_logprobs"] == [{"token": "e", "logprob": 0.4, "bytes": [101]}]


async def test_who_wants_log_probabilities_and_gives_no_credit_is_ended(monkeypatch):
    monkeypatch.setattr("gateway.stream_run.MAX_UNSENT_BYTES", 10_000)
    async with serve_streams() as gateway, gateway.connect() as stream:
        await stream.send({**start("a", logprobs=20, max_tokens=900), "stream": {"credits": 1}})
        await gateway.engine.wait_for_requests(1)
        await until(lambda: gateway.engine.num_active == 0)
        await stream.send({"type": "credit", "id": "a", "n": 1})
        _, error = await stream.answer("a")
    assert (error["status"], error["error"]["code"]) == (429, "too_much_unsent")


@pytest.mark.parametrize("logprobs", [-1, 21, 2**62])
async def test_more_alternatives_than_there_can_be_are_refused_by_name(logprobs):
    async with serve_streams() as gateway, gateway.connect() as stream:
        await stream.send(start("a", logprobs=logprobs))
        error = await stream.receive()
    assert (error["status"], error["error"]["param"]) == (400, "logprobs")


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
    assert gateway.engine.requests[0].cache_salt == "salt"
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


async def test_a_stop_string_works_when_token_ids_are_asked_for():
    async with serve_streams() as gateway, gateway.connect() as stream:
        await stream.send({**start("a", max_tokens=20, stop="fg"), "return_token_ids": True})
        messages = [await stream.receive()]
        while messages[-1]["type"] != "done":
            messages.append(await stream.receive())
        await gateway.engine.wait_until_idle()
    deltas, done = messages[1:-1], messages[-1]
    assert "".join(delta["text"] for delta in deltas) == "de"
    # All that was generated, so that the ids are as many as the usage says.
    assert [i for delta in deltas for i in delta["token_ids"]] == list(b"defg")
    assert done["usage"]["completion_tokens"] == 4
    assert done["stop_reason"] == "fg"


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
        "resume_ttl_s": 30.0,
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


@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Host": "evil.example"}])
async def test_a_strange_web_page_is_refused_before_the_upgrade(headers):
    async with serve_streams() as gateway:
        with pytest.raises(WSServerHandshakeError) as refused:
            await gateway.client.ws_connect(
                "/v1/stream", protocols=["headrace.v1.json"], headers=headers
            )
    assert refused.value.status == 403


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
