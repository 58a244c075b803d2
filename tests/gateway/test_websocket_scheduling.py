"""Who goes first, on whose behalf, and for how long a stream may wait."""

import pytest

from fakes import FakeEngine
from jaxengine.outputs import FinishReason
from stream_app import serve_streams, start

both_encodings = pytest.mark.parametrize("encoding", ["json", "msgpack"])


@both_encodings
async def test_scheduling_fields_reach_the_engine(encoding):
    fields = {"priority": -7, "tenant": "alice", "queue_timeout": 1.5, "deadline": 60}
    async with serve_streams() as gateway, gateway.connect(encoding) as stream:
        await stream.send(start("a", **fields))
        await stream.answer("a")
    [request] = gateway.engine.requests
    assert (request.priority, request.tenant) == (-7, "alice")
    assert (request.queue_timeout_s, request.deadline_s) == (1.5, 60)


@pytest.mark.parametrize(
    ("headers", "tenant"), [({"Authorization": "Bearer abc"}, "ba7816bf8f01cfea"), ({}, "")]
)
async def test_all_streams_of_a_connection_are_its_keys_unless_they_name_a_tenant(headers, tenant):
    async with serve_streams() as gateway, gateway.connect(headers=headers) as stream:
        for message in (start("a"), start("b", tenant="bob"), start("c", tenant=None)):
            await stream.send(message)
            await stream.answer(message["id"])
    assert [request.tenant for request in gateway.engine.requests] == [tenant, "bob", tenant]


@both_encodings
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 2**31),
        ("priority", 0.5),
        ("tenant", ""),
        ("tenant", "x" * 65),
        ("tenant", "\x1b[2J"),
        ("queue_timeout", 0),
        ("queue_timeout", 1e9),
        ("deadline", -1.0),
        ("deadline", "noon"),
    ],
)
async def test_a_bad_value_ends_its_stream_and_is_named(encoding, field, value):
    async with serve_streams() as gateway, gateway.connect(encoding) as stream:
        await stream.send(start("a", **{field: value}))
        _, error = await stream.answer("a")
        assert (error["status"], error["error"]["param"]) == (400, field)
        await stream.send(start("a"))  # the connection lives on
        assert (await stream.answer("a"))[1]["type"] == "done"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
async def test_only_finite_times_pass_in_msgpack(value):
    async with serve_streams() as gateway, gateway.connect("msgpack") as stream:
        await stream.send(start("a", deadline=value))
        _, error = await stream.answer("a")
    assert (error["status"], error["error"]["param"]) == (400, "deadline")


async def last_message(engine, reason, *, num_tokens=0):
    """Start a stream, let so many steps pass, and then the time."""
    engine.hold()
    async with serve_streams(engine) as gateway, gateway.connect() as stream:
        await stream.send(start("a", max_tokens=100))
        assert (await stream.receive())["type"] == "accepted"
        engine.step(num_tokens)
        engine.expire(reason)
        return await stream.answer("a")


async def test_a_stream_that_never_started_ends_with_an_error_and_a_time_to_retry():
    text, error = await last_message(FakeEngine(), FinishReason.QUEUE_TIMEOUT)
    assert text == ""
    assert (error["status"], error["error"]["code"]) == (429, "queue_timeout")
    assert error["retry_after_s"] == 0  # it did not wait at all in this test


async def test_at_the_deadline_a_stream_is_done_with_what_there_is():
    text, done = await last_message(FakeEngine(), FinishReason.DEADLINE, num_tokens=2)
    assert text == "de"
    assert (done["type"], done["finish_reason"], done["stop_reason"]) == ("done", "deadline", None)
    assert done["usage"]["completion_tokens"] == 2


async def test_a_deadline_before_the_first_token_is_an_error():
    _, error = await last_message(FakeEngine(), FinishReason.DEADLINE)
    assert (error["status"], error["error"]["code"]) == (429, "deadline_exceeded")
    assert "retry_after_s" not in error


@pytest.mark.parametrize("reason", ["queued_requests", "queued_tokens", "queue_timeout"])
async def test_a_refusal_names_its_reason(reason):
    engine = FakeEngine()
    engine.refuse(reason, retry_after_s=2.5)
    async with serve_streams(engine) as gateway, gateway.connect() as stream:
        await stream.send(start("a"))
        error = await stream.receive()
    assert (error["type"], error["error"]["code"], error["retry_after_s"]) == ("error", reason, 2.5)


async def test_preemptions_are_told():
    engine = FakeEngine()
    engine.num_preemptions = 2
    async with serve_streams(engine) as gateway, gateway.connect() as stream:
        await stream.send(start("a"))
        _, done = await stream.answer("a")
    assert done["timing"]["num_preemptions"] == 2
