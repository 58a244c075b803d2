"""The bounds of the ResumeStore: time, number, bytes."""

import asyncio
import contextlib

import pytest

from fakes import FakeEngine
from gateway.accounts import Account
from gateway.app_keys import GENERATOR
from gateway.callers import Caller
from gateway.config import GatewayConfig
from gateway.errors import GatewayError
from gateway.mailbox import Outbox
from gateway.messages import Accepted, Delta, Start, StartRequest, StreamOptions
from gateway.resumption import KeptStream, ResumeStore
from stream_app import serve_streams, until

CALLER = Caller(account=Account("anonymous"))


class Connection:
    """What the store sees of a connection."""

    def __init__(self):
        self.outbox = Outbox()
        self.ended = []

    def stream_ended(self, stream_id):
        self.ended.append(stream_id)

    def stream_taken_over(self, stream_id):
        raise AssertionError("nobody else resumes")


@contextlib.asynccontextmanager
async def open_store(engine: FakeEngine, **config):
    async with serve_streams(engine) as gateway:
        store = ResumeStore(gateway.app[GENERATOR], GatewayConfig(**config))
        yield store
        await store.close()
        assert (store.num_streams, store.num_waiting, store.num_bytes) == (0, 0, 0)
        assert engine.num_active == 0


async def lost_stream(store: ResumeStore, max_tokens: int = 1000) -> KeptStream | None:
    """Begin a stream, let its client learn the token, and lose the connection."""
    connection = Connection()
    request = StartRequest(prompt="Hi!", max_tokens=max_tokens)
    start = Start(id="a", request=request, stream=StreamOptions(resumable=True))
    kept = store.open(start, connection.outbox, connection, caller=CALLER)
    if kept is not None:
        assert isinstance(await connection.outbox.take(), Accepted)
        store.lose(kept, connection.outbox)
    return kept


def large_engine() -> FakeEngine:
    engine = FakeEngine(max_model_len=4096, max_num_seqs=2000, max_num_queued_requests=2000)
    engine.hold()
    return engine


async def test_a_thousand_abandoned_streams_stay_within_the_bytes_and_then_are_gone():
    engine = large_engine()
    async with open_store(engine, resume_total_bytes=200_000, resume_ttl_s=0.05) as store:
        for _ in range(1000):
            await lost_stream(store)
        assert store.num_waiting <= 1000
        most = 0
        for _ in range(300):
            engine.step()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            most = max(most, store.num_bytes)
        # What grows beyond the bound is given up before anything else happens.
        assert 0 < most <= 200_000
        await engine.wait_until_idle()
        await until(lambda: store.num_streams == 0)
    assert engine.num_aborts == 1000


async def test_beyond_the_bytes_streams_that_are_carried_keep_nothing_to_send_again():
    engine = large_engine()
    async with open_store(engine, resume_total_bytes=500) as store:
        connection = Connection()
        for stream_id in "abc":
            start = Start(
                id=stream_id,
                request=StartRequest(prompt="Hi!", max_tokens=1000),
                stream=StreamOptions(resumable=True),
            )
            store.open(start, connection.outbox, connection, caller=CALLER)
        texts = dict.fromkeys("abc", "")
        for _ in range(3):
            assert isinstance(await connection.outbox.take(), Accepted)
        for _ in range(100):
            engine.step()
            for _ in range(3):
                delta = await connection.outbox.take()
                assert isinstance(delta, Delta)
                texts[delta.id] += delta.text
            assert store.num_bytes <= 500 + 20  # and what has just been sent
        assert {len(text) for text in texts.values()} == {100}
        assert store.num_streams == 3


async def test_beyond_the_number_the_longest_lost_is_given_up():
    engine = large_engine()
    async with open_store(engine, resume_max_streams=3) as store:
        kept = [await lost_stream(store) for _ in range(5)]
        await engine.wait_until(lambda: engine.num_active == 3)
        for index, stream in enumerate(kept):
            assert stream is not None
            if index < 2:
                with pytest.raises(GatewayError):
                    store.find(stream.token, principal="")
            else:
                assert store.find(stream.token, principal="") is stream


async def test_when_all_are_carried_a_new_one_cannot_be_resumed_and_takes_nothing_away():
    engine = large_engine()
    async with open_store(engine, resume_max_streams=2) as store:
        connection = Connection()
        for stream_id, is_kept in (("a", True), ("b", True), ("c", False)):
            start = Start(
                id=stream_id,
                request=StartRequest(prompt="Hi!"),
                stream=StreamOptions(resumable=True),
            )
            kept = store.open(start, connection.outbox, connection, caller=CALLER)
            assert (kept is not None) == is_kept


async def test_a_stream_that_was_read_to_its_end_waits_for_its_time_and_then_is_gone():
    engine = FakeEngine()
    async with open_store(engine, resume_ttl_s=0.01) as store:
        connection = Connection()
        request = StartRequest(prompt="Hi!", max_tokens=2)
        start = Start(id="a", request=request, stream=StreamOptions(resumable=True))
        store.open(start, connection.outbox, connection, caller=CALLER)
        text = ""
        while connection.ended == []:
            message = await connection.outbox.take()
            if isinstance(message, Delta):
                text += message.text
        assert (text, store.num_waiting, connection.ended) == ("de", 1, ["a"])
        await until(lambda: store.num_streams == 0)
        assert store.num_bytes == 0


async def test_a_resume_stops_the_clock():
    engine = FakeEngine()
    engine.hold()
    async with open_store(engine, resume_ttl_s=0.02) as store:
        first, second = await lost_stream(store), await lost_stream(store)
        assert first is not None
        assert second is not None
        connection = Connection()
        store.resume(
            first.token,
            principal="",
            after=-1,
            stream_id="again",
            credits=None,
            outbox=connection.outbox,
            carrier=connection,
        )
        await until(lambda: store.num_streams == 1)  # the second's time is over
        assert store.find(first.token, principal="") is first
        await engine.wait_until(lambda: engine.num_active == 1)
