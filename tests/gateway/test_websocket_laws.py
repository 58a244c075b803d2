"""Laws of the stream protocol under random use, and random bytes."""

import asyncio
from contextlib import AsyncExitStack

import msgpack
import orjson
from aiohttp import WSMsgType
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fakes import FakeEngine
from stream_app import RawStream, serve_streams, start

IDS = ["a", "b", "c", "d", "e"]


class ProtocolLaws(RuleBasedStateMachine):
    """A client that does anything in any order; what it receives must keep the laws."""

    def __init__(self):
        super().__init__()
        self.runner = asyncio.Runner()
        self.runner.run(self._open())
        self.next_ping = 0
        self.num_starts = 0
        self.num_clashes = 0
        self.num_ends = 0
        self.next_seq = {}  # of the streams that have been accepted and not ended

    async def _open(self):
        self.stack = AsyncExitStack()
        self.engine = FakeEngine(max_num_seqs=3, max_num_queued_requests=2)
        self.engine.hold()
        gateway = await self.stack.enter_async_context(serve_streams(self.engine, ws_max_streams=4))
        self.stream = await self.stack.enter_async_context(gateway.connect())

    @rule(stream_id=st.sampled_from(IDS), max_tokens=st.integers(1, 6))
    def start_a_stream(self, stream_id, max_tokens):
        self._send(start(stream_id, max_tokens=max_tokens))
        self.num_starts += 1

    @rule(
        stream_id=st.sampled_from(IDS),
        fault=st.sampled_from([{"temperature": -1}, {"top_k": "x"}, {"prompt": []}, {"seed": []}]),
    )
    def start_a_stream_wrongly(self, stream_id, fault):
        self._send(start(stream_id, **fault))
        self.num_starts += 1

    @rule(stream_id=st.sampled_from(IDS), credits=st.integers(1, 2), resumable=st.booleans())
    def start_a_stream_with_credits(self, stream_id, credits, resumable):
        options = {"credits": credits, "resumable": resumable}
        self._send({**start(stream_id, max_tokens=6), "stream": options})
        self.num_starts += 1

    @rule(stream_id=st.sampled_from(IDS), n=st.integers(1, 2))
    def grant_credit(self, stream_id, n):
        self._send({"type": "credit", "id": stream_id, "n": n})

    @rule(stream_id=st.sampled_from(IDS))
    def resume_what_is_not_there(self, stream_id):
        self._send({"type": "resume", "id": stream_id, "token": "guessed"})
        self.num_starts += 1

    @rule(stream_id=st.sampled_from(IDS))
    def cancel_a_stream(self, stream_id):
        self._send({"type": "cancel", "id": stream_id})

    @rule()
    def send_nonsense(self):
        self._send({"type": "nonsense", "id": "a"})

    @rule(n=st.integers(1, 4))
    def step_the_engine(self, n):
        self.engine.step(n)

    @rule()
    def fail_the_requests(self):
        self.engine.fail_requests()

    @rule()
    def read_what_has_come(self):
        self.next_ping += 1
        self._send({"type": "ping", "t": self.next_ping})
        while (message := self._receive()) != {"type": "pong", "t": self.next_ping}:
            self.check(message)

    def check(self, message):
        stream_id = message.get("id")
        match message["type"]:
            case "accepted":
                assert stream_id not in self.next_seq
                self.next_seq[stream_id] = 0
            case "delta":
                assert message["seq"] == self.next_seq[stream_id]
                assert message["text"]
                self.next_seq[stream_id] += 1
            case "done":
                # A stream that was cancelled before it was accepted ends without ever beginning.
                assert message["seq"] == self.next_seq.pop(stream_id, 0)
                self.num_ends += 1
            case "error" if stream_id is not None:
                self.next_seq.pop(stream_id, None)
                self.num_ends += 1
            case "error":
                code = message["error"]["code"]
                assert code in ("id_in_use", "unknown_id", "unknown_type", "invalid_message")
                # A faulty start whose id is in use is a clash as well: it must not end the other.
                self.num_clashes += code == "id_in_use" or (
                    code == "invalid_message" and message["error"]["param"] != "type"
                )
            case _:
                raise AssertionError(message)

    @invariant()
    def no_more_ends_than_starts(self):
        assert self.num_ends + self.num_clashes <= self.num_starts

    def teardown(self):
        try:
            for stream_id in IDS:  # so that what is without credit can end
                self._send({"type": "credit", "id": stream_id, "n": 100})
            self.runner.run(self._let_the_engine_run())
            while self.num_ends + self.num_clashes < self.num_starts:
                self.check(self._receive())
            self.read_what_has_come()
            assert self.num_ends + self.num_clashes == self.num_starts
            assert self.next_seq == {}
        finally:
            self.runner.run(self.stack.aclose())
            self.runner.close()

    async def _let_the_engine_run(self):
        self.engine.release()
        await self.engine.wait_until_idle()

    def _send(self, message):
        self.runner.run(self.stream.send(message))

    def _receive(self):
        return self.runner.run(self.stream.receive())


class TestProtocolLaws(ProtocolLaws.TestCase):
    settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


# ---- random bytes ------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = [
    *("prompt", "messages", "model", "max_tokens", "min_tokens", "temperature", "top_p", "top_k"),
    *("min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "cache_salt", "role", "content"),
]
REQUESTS = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5) | VALUES
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["start", "cancel", "ping", "credit", "resume"]) | VALUES,
        "id": st.sampled_from(["a", "b", ""]) | VALUES,
        "request": REQUESTS,
        "t": VALUES,
        "return_token_ids": VALUES,
        "stream": st.fixed_dictionaries({}, optional={"credits": VALUES, "resumable": VALUES})
        | VALUES,
        "n": VALUES,
        "token": VALUES,
        "after": VALUES,
    },
)


def as_json(message):
    return orjson.dumps(message, default=str, option=orjson.OPT_NON_STR_KEYS)


FRAMES = st.one_of(
    st.tuples(st.just("json"), st.lists(MESSAGES.map(as_json) | st.binary(max_size=60))),
    st.tuples(st.just("msgpack"), st.lists(MESSAGES.map(msgpack.packb) | st.binary(max_size=60))),
)


@settings(max_examples=80, deadline=None)
@given(FRAMES)
async def test_no_frame_does_more_than_earn_an_error_or_a_close(frames):
    encoding, frames = frames
    engine = FakeEngine(max_model_len=64)
    async with serve_streams(engine) as gateway:
        async with gateway.connect(encoding) as stream:
            for frame in frames:
                await stream.send_raw(frame)
            await stream.send({"type": "ping", "t": 0.125})
            await _read_to_pong(stream)
        async with gateway.connect(encoding) as stream:
            await stream.send(start("again"))
            assert (await stream.answer("again"))[0] == "defg"


async def _read_to_pong(stream: RawStream):
    while True:
        frame = await stream.ws.receive()
        if frame.type in (WSMsgType.CLOSE, WSMsgType.CLOSED):
            assert stream.ws.close_code == 1007
            return
        message = orjson.loads(frame.data) if stream.is_json else msgpack.unpackb(frame.data)
        if message == {"type": "pong", "t": 0.125}:
            return
        if message["type"] == "error":
            assert 400 <= message["status"] < 500, message
