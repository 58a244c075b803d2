"""One generation without any connection."""

import asyncio
import contextlib

import pytest

from fakes import FakeEngine
from gateway.accounts import Account
from gateway.app_keys import CONFIG, GENERATOR
from gateway.callers import Caller
from gateway.mailbox import Mailbox, Outbox
from gateway.messages import Accepted, Delta, Done, Error, Start, StartRequest
from gateway.stream_buffer import PlainBuffer
from gateway.stream_run import StreamRun
from stream_app import serve_streams


@contextlib.asynccontextmanager
async def running(engine: FakeEngine, *, token: str | None = None, **request):
    """Run one generation; yield it and the outbox that carries it."""
    async with serve_streams(engine) as gateway:
        outbox = Outbox()
        mailbox = Mailbox("a", PlainBuffer(), with_token_ids=False, credits=1)
        outbox.attach(mailbox)
        run = StreamRun(
            Start(id="a", request=StartRequest(prompt="Hi!", **request)),
            mailbox,
            gateway.app[GENERATOR],
            gateway.app[CONFIG],
            caller=Caller(account=Account("anonymous")),
            resume_token=token,
        )
        run.task = asyncio.create_task(run.run())
        yield run, outbox
        run.abandon()
        await asyncio.gather(run.task, return_exceptions=True)


@pytest.mark.parametrize("token", [None, "secret"])
async def test_a_run_is_accepted_with_its_token_and_ends_with_one_last_message(token):
    engine = FakeEngine()
    async with running(engine, token=token, max_tokens=1) as (run, outbox):
        accepted, delta, done = [await outbox.take() for _ in range(3)]
    assert isinstance(accepted, Accepted)
    assert getattr(accepted, "resume_token", None) == token or token is None
    assert accepted.request_id == run.request_id == "r0"
    assert isinstance(delta, Delta)
    assert isinstance(done, Done)
    assert (delta.text, done.finish_reason) == ("d", "length")


async def test_a_refusal_is_the_last_message():
    async with running(FakeEngine(), model="other") as (run, outbox):
        error = await outbox.take()
    assert isinstance(error, Error)
    assert (error.status, run.request_id) == (404, "")


async def test_cancel_sends_what_is_there_whatever_the_credits():
    engine = FakeEngine()
    engine.hold()
    async with running(engine) as (run, outbox):
        assert isinstance(await outbox.take(), Accepted)
        engine.step()
        assert isinstance(await outbox.take(), Delta)  # the one credit
        engine.step(2)
        run.cancel()
        run.cancel()
        delta, done = await outbox.take(), await outbox.take()
    assert isinstance(delta, Delta)
    assert isinstance(done, Done)
    assert (delta.text, done.finish_reason, done.usage.completion_tokens) == (
        "ef",
        "cancelled",
        3,
    )


async def test_abandoning_frees_the_engine_and_says_nothing():
    engine = FakeEngine()
    engine.hold()
    async with running(engine) as (run, outbox):
        await outbox.take()
        run.abandon()
        await engine.wait_until_idle()
        assert not run.mailbox.has_ended
    assert engine.num_aborts == 1
