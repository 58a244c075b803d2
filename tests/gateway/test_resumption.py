"""Streams that go on after their connection was lost; see test_resumption_store for the bounds."""

import asyncio

import pytest

from fakes import FakeEngine
from gateway.app_keys import METRICS
from gateway.connections import STREAM_CONNECTIONS, begin_drain
from gateway.resumption import RESUME_STORE
from stream_app import MODEL, RawStream, serve_streams, start, until

both_encodings = pytest.mark.parametrize("encoding", ["json", "msgpack"])

# FakeEngine answers "Hi!" (3 bytes) with the letters from chr(ord("a") + 3) on.
ANSWER = "defghijklmno"


def resumable(stream_id: str = "a", *, credits: int | None = None, **request):
    message = start(stream_id, **{"max_tokens": len(ANSWER), **request})
    options = {"resumable": True} if credits is None else {"resumable": True, "credits": credits}
    return {**message, "stream": options}


def resume(token: str, after: int | None = None, stream_id: str = "a", **fields):
    return {"type": "resume", "id": stream_id, "token": token, "after": after, **fields}


def cut(stream: RawStream) -> None:
    """Break the connection without a close frame, as a crash does."""
    stream.ws._response.connection.transport.abort()


async def cut_and_wait(gateway, stream: RawStream) -> None:
    num_open = len(gateway.app[STREAM_CONNECTIONS])
    cut(stream)
    await until(lambda: len(gateway.app[STREAM_CONNECTIONS]) < num_open)


async def receive_text(stream: RawStream, num_deltas: int) -> str:
    deltas = [await stream.receive() for _ in range(num_deltas)]
    assert {delta["type"] for delta in deltas} == {"delta"}
    return "".join(delta["text"] for delta in deltas)


# ---- the text goes on --------------------------------------------------------------------------


@both_encodings
async def test_a_stream_that_was_cut_goes_on_where_the_client_was(encoding):
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway:
        async with gateway.connect(encoding) as stream:
            await stream.send({**resumable(), "return_token_ids": True})
            accepted = await stream.receive()
            engine.step(2)
            first = await stream.receive()
            engine.step()
            await stream.receive()  # as if it had been lost
            await cut_and_wait(gateway, stream)
        engine.step(3)
        async with gateway.connect(encoding) as stream:
            await stream.send(resume(accepted["resume_token"], first["seq"], "other-name"))
            resumed = await stream.receive()
            second = await stream.receive()
            engine.release()
            rest, done = await stream.answer("other-name")
    assert resumed == {"type": "resumed", "id": "other-name", "request_id": "r0"}
    assert (first["seq"], first["text"]) == (0, "de")
    # One delta for everything since, with the number after the last one that was sent.
    assert (second["seq"], second["text"]) == (2, "fghi")
    assert bytes(first["token_ids"] + second["token_ids"]) == b"defghi"
    assert first["text"] + second["text"] + rest == ANSWER
    assert done["usage"]["completion_tokens"] == len(ANSWER)
    assert engine.num_aborts == 0


async def test_only_who_asks_for_it_gets_a_token_and_all_else_ends_with_the_connection():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway:
        async with gateway.connect() as stream:
            await stream.send(start("a"))
            await stream.send(resumable("b"))
            accepted = {m["id"]: m for m in [await stream.receive(), await stream.receive()]}
            await cut_and_wait(gateway, stream)
        await engine.wait_until(lambda: engine.num_active == 1)
        engine.release()
    assert "resume_token" not in accepted["a"]
    assert len(accepted["b"]["resume_token"]) >= 22  # 128 bits in base64


async def test_what_waits_and_what_it_holds_are_metrics():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway:
        name = f'headrace_streams_waiting_for_resume{{model_name="{MODEL}"}}'.encode()
        assert name + b" 0.0" in gateway.app[METRICS].render()[0]
        async with gateway.connect() as stream:
            await stream.send(resumable())
            await stream.receive()
            engine.step()
            await receive_text(stream, 1)
            await cut_and_wait(gateway, stream)
        rendered = gateway.app[METRICS].render()[0]
        assert name + b" 1.0" in rendered
        # One letter, and 24 bytes for where the delta ends: in text, ids, log-probabilities.
        assert f'headrace_resume_bytes{{model_name="{MODEL}"}} 25.0'.encode() in rendered
        engine.release()


@pytest.mark.parametrize("when", ["running", "complete", "done was sent"])
async def test_it_can_be_resumed_while_it_runs_and_for_a_while_after_its_end(when):
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway:
        async with gateway.connect() as stream:
            await stream.send(resumable())
            token = (await stream.receive())["resume_token"]
            engine.step(3)
            assert await receive_text(stream, 1) == "def"
            if when == "done was sent":
                engine.release()
                assert (await stream.answer("a"))[1]["type"] == "done"
            await cut_and_wait(gateway, stream)
        if when == "complete":
            engine.release()
            await engine.wait_until_idle()
        async with gateway.connect() as stream:
            await stream.send(resume(token, 0))
            assert (await stream.receive())["type"] == "resumed"
            engine.release()
            text, done = await stream.answer("a")
    assert "def" + text == ANSWER
    assert (done["finish_reason"], done["usage"]["completion_tokens"]) == ("length", len(ANSWER))


async def test_it_can_be_resumed_again_and_again_and_from_the_beginning():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway:
        async with gateway.connect() as stream:
            await stream.send(resumable())
            token = (await stream.receive())["resume_token"]
            await cut_and_wait(gateway, stream)
        for num_steps in range(1, 5):
            engine.step()
            async with gateway.connect() as stream:
                await stream.send(resume(token))
                await stream.receive()
                delta = await stream.receive()
                assert delta["text"] == ANSWER[:num_steps]
                await cut_and_wait(gateway, stream)
        engine.release()
        async with gateway.connect() as stream:
            await stream.send(resume(token, delta["seq"]))
            assert (await stream.answer("a"))[0] == ANSWER[4:]


async def test_of_two_sockets_the_newest_has_the_stream_and_the_other_is_told():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway, gateway.connect() as first:
        await first.send(resumable("mine"))
        token = (await first.receive())["resume_token"]
        engine.step()
        assert await receive_text(first, 1) == "d"
        async with gateway.connect() as second, gateway.connect() as third:
            for stream in (second, third):
                await stream.send(resume(token, 0, "yours"))
                assert (await stream.receive())["type"] == "resumed"
            errors = [await first.receive(), await second.receive()]
            engine.release()
            assert (await third.answer("yours"))[0] == ANSWER[1:]
        # The others' connections live on.
        await first.send(start("mine"))
        assert (await first.answer("mine"))[0] == ANSWER[:4]
    assert [(e["id"], e["status"], e["error"]["code"]) for e in errors] == [
        ("mine", 409, "resumed_elsewhere"),
        ("yours", 409, "resumed_elsewhere"),
    ]


async def test_a_connection_can_take_over_a_stream_from_itself():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway, gateway.connect() as stream:
        await stream.send(resumable())
        token = (await stream.receive())["resume_token"]
        await stream.send(resume(token, None, "a"))
        assert (await stream.receive())["error"]["code"] == "id_in_use"
        await stream.send(resume(token, None, "b"))
        assert (await stream.receive())["error"]["code"] == "resumed_elsewhere"
        engine.release()
        assert (await stream.answer("b"))[0] == ANSWER


async def test_credits_are_granted_anew_and_cancel_works_after_a_resume():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway:
        async with gateway.connect() as stream:
            await stream.send(resumable(credits=1))
            token = (await stream.receive())["resume_token"]
            engine.step()
            assert await receive_text(stream, 1) == "d"
            engine.step()
            await cut_and_wait(gateway, stream)
        async with gateway.connect() as stream:
            await stream.send(resume(token, 0, credits=1))
            await stream.receive()
            assert await receive_text(stream, 1) == "e"
            engine.step(2)
            await stream.send({"type": "ping", "t": 1})
            assert (await stream.receive())["type"] == "pong"  # and no delta
            await stream.send({"type": "credit", "id": "a", "n": 1})
            assert await receive_text(stream, 1) == "fg"
            engine.step()
            await stream.send({"type": "cancel", "id": "a"})
            text, done = await stream.answer("a")
    assert (text, done["finish_reason"]) == ("h", "cancelled")
    assert done["usage"]["completion_tokens"] == 5
    assert engine.num_aborts == 1


# ---- who may not -------------------------------------------------------------------------------


async def ask_to_resume(gateway, message, **options):
    async with gateway.connect(**options) as stream:
        await stream.send(message)
        error = await stream.receive()
        await stream.send(start("free"))  # the id and the connection are as they were
        assert (await stream.answer("free"))[0] == ANSWER[:4]
        return error


async def test_a_wrong_token_and_somebody_elses_get_the_same_answer():
    engine = FakeEngine()
    async with serve_streams(engine) as gateway:
        key = {"Authorization": "Bearer mine"}
        async with gateway.connect(headers=key) as stream:
            await stream.send(resumable())
            token = (await stream.receive())["resume_token"]
            await cut_and_wait(gateway, stream)
        errors = [
            await ask_to_resume(gateway, resume("x" * 22)),
            await ask_to_resume(gateway, resume(token)),
            await ask_to_resume(gateway, resume(token), headers={"Authorization": "Bearer other"}),
        ]
        assert errors[0] == errors[1] == errors[2]
        assert (errors[0]["status"], errors[0]["error"]["code"]) == (404, "resume_unknown")
        assert errors[0]["id"] == "a"
        async with gateway.connect(headers=key) as stream:
            await stream.send(resume(token))
            assert (await stream.answer("a"))[0] == ANSWER


async def test_after_its_time_a_stream_is_aborted_and_unknown():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine, resume_ttl_s=0.01) as gateway:
        async with gateway.connect() as stream:
            await stream.send(resumable())
            token = (await stream.receive())["resume_token"]
            await cut_and_wait(gateway, stream)
        await engine.wait_until_idle()
        engine.release()
        error = await ask_to_resume(gateway, resume(token))
        assert gateway.app[RESUME_STORE].num_streams == 0
    assert engine.num_aborts == 1
    assert error["error"]["code"] == "resume_unknown"


async def test_what_is_no_longer_kept_is_a_gap_that_is_told():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine, resume_stream_bytes=100) as gateway:
        async with gateway.connect() as stream:
            await stream.send(resumable())
            token = (await stream.receive())["resume_token"]
            for _ in range(8):
                engine.step()
                await receive_text(stream, 1)
            await cut_and_wait(gateway, stream)
        engine.release()
        await engine.wait_until_idle()
        error = await ask_to_resume(gateway, resume(token, 0))
        assert (error["status"], error["error"]["code"]) == (410, "resume_gap")
        assert error["error"]["param"] == "after"
        assert (await ask_to_resume(gateway, resume(token, 99)))["error"]["code"] == "resume_gap"
        async with gateway.connect() as stream:
            await stream.send(resume(token, 7))
            assert (await stream.answer("a"))[0] == ANSWER[8:]


async def test_a_lost_stream_with_more_to_say_than_is_kept_is_aborted():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine, resume_stream_bytes=5) as gateway:
        async with gateway.connect() as stream:
            await stream.send(resumable())
            token = (await stream.receive())["resume_token"]
            await cut_and_wait(gateway, stream)
        engine.step(6)
        await engine.wait_until_idle()
        engine.release()
        error = await ask_to_resume(gateway, resume(token))
    assert engine.num_aborts == 1
    assert (error["status"], error["error"]["code"]) == (410, "resume_gap")


async def test_a_polite_goodbye_aborts_at_once():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway:
        async with gateway.connect() as stream:
            await stream.send(resumable())
            await stream.receive()
            await stream.ws.close(code=1000)
        await engine.wait_until_idle()
        assert gateway.app[RESUME_STORE].num_streams == 0
        engine.release()


async def test_without_an_accepted_that_was_sent_nobody_can_resume_so_it_is_aborted_at_once():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway:
        async with gateway.connect() as stream:
            await stream.send(resumable("a", temperature=-1))
            assert (await stream.receive())["type"] == "error"
            assert gateway.app[RESUME_STORE].num_streams == 0
            await stream.send(resumable("b", prompt="x" * 500))
            cut(stream)
        await until(lambda: not gateway.app[STREAM_CONNECTIONS])
        await engine.wait_until_idle()
        assert gateway.app[RESUME_STORE].num_waiting == 0
        engine.release()


# ---- draining ----------------------------------------------------------------------------------


async def test_goaway_comes_before_the_drain_and_what_runs_goes_on():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway, gateway.connect() as stream:
        await stream.send(start("a"))
        await stream.receive()
        begin_drain(gateway.app)
        stopping = asyncio.create_task(engine.stop(drain_timeout_s=60))
        goaway = await stream.receive()
        await stream.send(start("b"))
        refused = await stream.receive()
        engine.release()
        text, done = await stream.answer("a")
        await stopping
    assert goaway["type"] == "goaway"
    assert goaway["retry_after_s"] > 0
    assert (refused["id"], refused["status"]) == ("b", 503)
    assert refused["error"]["code"] == "shutting_down"
    assert (text, done["type"]) == (ANSWER[:4], "done")


async def test_a_stream_can_be_resumed_during_the_drain():
    engine = FakeEngine()
    engine.hold()
    async with serve_streams(engine) as gateway:
        async with gateway.connect() as stream:
            await stream.send(resumable())
            token = (await stream.receive())["resume_token"]
            await cut_and_wait(gateway, stream)
        begin_drain(gateway.app)
        stopping = asyncio.create_task(engine.stop(drain_timeout_s=60))
        async with gateway.connect() as stream:
            assert (await stream.receive())["type"] == "goaway"
            await stream.send(resume(token))
            assert (await stream.receive())["type"] == "resumed"
            engine.release()
            assert (await stream.answer("a"))[0] == ANSWER
        await stopping


async def test_without_anything_to_resume_a_draining_server_takes_no_connection():
    async with serve_streams() as gateway:
        begin_drain(gateway.app)
        await gateway.engine.stop(drain_timeout_s=0)
        response = await gateway.client.get(
            "/v1/stream",
            headers={"Upgrade": "websocket", "Sec-WebSocket-Protocol": "headrace.v1.json"},
        )
        assert response.status == 503
