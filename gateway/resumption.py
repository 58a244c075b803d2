"""Streams that survive the loss of their connection for a while, within fixed bounds.

A stream is carried by a connection, or lost: then it waits for a `resume` that brings its token
and the key that it was started with. One that nobody comes for in time is ended, and the engine
is free of it. One whose last message was sent waits as well, for that may not have arrived.

Owns: the tasks of these generations, and the memory for what they may have to send again.
"""

import asyncio
import hmac
import secrets
from typing import Protocol

from aiohttp import web

from gateway.callers import Caller
from gateway.config import GatewayConfig
from gateway.errors import GatewayError, NotFound
from gateway.generation import TextGenerator
from gateway.mailbox import Mailbox, Outbox
from gateway.messages import Resumed, Start
from gateway.stream_buffer import ResumeBuffer, ResumeGap
from gateway.stream_run import StreamRun

__all__ = ["RESUME_STORE", "Carrier", "KeptStream", "ResumeStore", "taken_over"]

TOKEN_BYTES = 16


class Carrier(Protocol):
    """The connection that carries a stream."""

    def stream_ended(self, stream_id: str) -> None:
        """Its last message was taken."""
        ...

    def stream_taken_over(self, stream_id: str) -> None:
        """Another connection has resumed it; nothing more of it comes here."""
        ...


def taken_over() -> GatewayError:
    """Return what the connection is told that a stream has left."""
    return GatewayError(
        "the stream was resumed on another connection",
        status=409,
        type="invalid_request_error",
        code="resumed_elsewhere",
    )


class KeptStream:
    """A stream that can be resumed.

    Attributes:
        token: what a client must bring.
        run: its generation.
        carrier: None while it is lost, and once its last message was sent.
        expires_s: when it is given up, on the loop's clock; meaningless while it is carried.
    """

    __slots__ = ("buffer", "carrier", "expires_s", "principal", "run", "token")

    def __init__(self, token: str, principal: str, buffer: ResumeBuffer, run: StreamRun) -> None:
        self.token = token
        self.principal = principal
        self.buffer = buffer
        self.run = run
        self.carrier: Carrier | None = None
        self.expires_s = 0.0


class ResumeStore:
    """All streams that can be resumed, by token.

    Bounds: the time that a lost stream waits, the number of streams, and the bytes that they hold.
    When room is short, those that have waited longest are given up first.
    """

    def __init__(self, generator: TextGenerator, config: GatewayConfig) -> None:
        self._generator = generator
        self._config = config
        self._streams: dict[str, KeptStream] = {}
        self._waiting: dict[str, KeptStream] = {}  # without a carrier, the longest waiting first
        self._num_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def num_waiting(self) -> int:
        """Streams that no connection carries."""
        return len(self._waiting)

    @property
    def num_bytes(self) -> int:
        """Memory for what may have to be sent again."""
        return self._num_bytes

    def open(
        self, start: Start, outbox: Outbox, carrier: Carrier, *, caller: Caller
    ) -> KeptStream | None:
        """Begin a generation that can be resumed; None if there is no room for another.

        Only the caller's principal may resume it, on whatever connection.
        """
        while len(self._streams) >= self._config.resume_max_streams:
            if not self._waiting:
                return None
            self.drop(next(iter(self._waiting.values())))
        token = secrets.token_urlsafe(TOKEN_BYTES)
        options = start.stream
        buffer = ResumeBuffer(
            max_bytes=self._config.resume_stream_bytes,
            on_growth=lambda growth: self._grow(kept, growth),
        )
        mailbox = Mailbox(
            start.id,
            buffer,
            with_token_ids=bool(start.return_token_ids),
            with_logprobs=start.request.logprobs is not None,
            credits=options.credits if options is not None else None,
            on_end=lambda: self._end(kept),
        )
        run = StreamRun(
            start, mailbox, self._generator, self._config, caller=caller, resume_token=token
        )
        kept = KeptStream(token, caller.principal, buffer, run)
        kept.carrier = carrier
        self._streams[token] = kept
        outbox.attach(mailbox)
        run.task = asyncio.create_task(run.run())
        self._tasks.add(run.task)
        run.task.add_done_callback(self._tasks.discard)
        return kept

    def resume(
        self,
        token: str,
        *,
        principal: str,
        after: int,
        stream_id: str,
        credits: int | None,
        outbox: Outbox,
        carrier: Carrier,
    ) -> KeptStream:
        """Let another connection carry a stream, from the delta after the one numbered `after`.

        The newest wins: a connection that carries it now, perhaps without knowing that its client
        is gone, has it no longer.

        Raises:
            GatewayError: no such stream of this principal (404), or what the client lacks is no
                longer kept (410).
        """
        kept = self.find(token, principal=principal)
        try:
            kept.buffer.rewind(after)
        except ResumeGap:
            raise GatewayError(
                f"what comes after {after} is not kept; the server keeps the newest "
                f"{self._config.resume_stream_bytes} bytes of a stream",
                status=410,
                type="invalid_request_error",
                param="after",
                code="resume_gap",
            ) from None
        self._take_from_carrier(kept)
        self._waiting.pop(token, None)
        kept.carrier = carrier
        mailbox = kept.run.mailbox
        mailbox.stream_id = stream_id
        mailbox.credits = credits
        mailbox.put_first(Resumed(id=stream_id, request_id=kept.run.request_id))
        outbox.attach(mailbox)
        return kept

    def find(self, token: str, *, principal: str) -> KeptStream:
        """Return the stream with this token.

        Raises:
            NotFound: there is none, or it is somebody else's; the answer does not tell which.
        """
        kept = self._streams.get(token)
        if kept is None or not hmac.compare_digest(kept.principal.encode(), principal.encode()):
            raise NotFound(
                "no stream can be resumed with this token; a stream that nobody resumes is given "
                f"up after {self._config.resume_ttl_s:g} s",
                param="token",
                code="resume_unknown",
            )
        return kept

    def lose(self, kept: KeptStream, outbox: Outbox) -> None:
        """The connection that carries it is gone; let it wait for another."""
        outbox.detach(kept.run.mailbox)
        kept.carrier = None
        if kept.run.mailbox.is_known:
            self._wait(kept)
        else:  # nobody has the token
            self.drop(kept)

    def drop(self, kept: KeptStream) -> None:
        """Give it up now: nobody will resume it. Idempotent."""
        if self._streams.pop(kept.token, None) is None:
            return
        self._waiting.pop(kept.token, None)
        kept.run.abandon()
        kept.buffer.clear()

    async def close(self) -> None:
        """Give up all of them; nothing is left running."""
        if self._timer is not None:
            self._timer.cancel()
        for kept in list(self._streams.values()):
            self.drop(kept)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _take_from_carrier(self, kept: KeptStream) -> None:
        if kept.carrier is not None:
            carrier, kept.carrier = kept.carrier, None
            carrier.stream_taken_over(kept.run.mailbox.stream_id)

    def _end(self, kept: KeptStream) -> None:
        """Its last message was taken; but it may not arrive."""
        if kept.carrier is not None:
            carrier, kept.carrier = kept.carrier, None
            carrier.stream_ended(kept.run.mailbox.stream_id)
        if kept.run.mailbox.is_known:
            self._wait(kept)
        else:  # refused: nobody has the token
            self.drop(kept)

    def _wait(self, kept: KeptStream) -> None:
        loop = asyncio.get_running_loop()
        kept.expires_s = loop.time() + self._config.resume_ttl_s
        self._waiting[kept.token] = kept
        if self._timer is None:
            self._timer = loop.call_at(kept.expires_s, self._expire)
        self._give_up_too_much(kept)

    def _expire(self) -> None:
        """Give up those whose time is over; one timer serves all, for all wait equally long."""
        self._timer = None
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        while self._waiting:
            oldest = next(iter(self._waiting.values()))
            if oldest.expires_s > now_s:
                self._timer = loop.call_at(oldest.expires_s, self._expire)
                return
            self.drop(oldest)

    def _grow(self, kept: KeptStream, growth: int) -> None:
        self._num_bytes += growth
        if growth > 0 and (
            kept.carrier is None or self._num_bytes > self._config.resume_total_bytes
        ):
            self._give_up_too_much(kept)

    def _give_up_too_much(self, kept: KeptStream) -> None:
        """Keep the bounds on memory.

        A stream that is carried merges what it has to send, as any other does. One that waits
        and has more to send than is kept of a stream could not be resumed anyway. When nothing
        that waits is left to give up, streams keep nothing to send again.
        """
        if (
            kept.carrier is None
            and kept.token in self._waiting
            and kept.buffer.num_unsent_bytes > self._config.resume_stream_bytes
        ):
            self._lose_output(kept)
        while self._num_bytes > self._config.resume_total_bytes and self._waiting:
            self.drop(next(iter(self._waiting.values())))
        if self._num_bytes > self._config.resume_total_bytes:
            kept.buffer.forget_sent()

    def _lose_output(self, kept: KeptStream) -> None:
        """End the generation; who comes for it within its time is told of the gap."""
        kept.run.abandon()
        kept.buffer.clear()


RESUME_STORE: web.AppKey[ResumeStore] = web.AppKey("RESUME_STORE", ResumeStore)
