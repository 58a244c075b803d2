"""What has arrived for one stream and was not read yet."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from headrace_client.errors import (
    ConnectionLost,
    GenerationFailed,
    HeadraceError,
    ProtocolError,
    rejection,
)
from headrace_client.messages import (
    Accepted,
    Delta,
    Done,
    Resumed,
    ServerError,
    TokenLogprob,
)

__all__ = ["CREDITS", "StreamInbox", "TextDelta"]

# Deltas that the server may send ahead of the reader, and how many read ones make a new credit.
CREDITS = 256
CREDIT_BATCH = CREDITS // 2
# More than any answer has. A server that sends more of one stream, unread, is not listened to.
MAX_UNREAD_CHARS = 16 * 1024 * 1024

# Codes of errors that end the attempt to resume, and with it the stream for its reader.
_RESUME_ERRORS = frozenset({"resume_unknown", "resume_gap", "resumed_elsewhere"})


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDelta:
    """New text of an answer; `token_ids` and `logprobs` are empty unless they were asked for."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


class StreamInbox:
    """Deltas of one stream, merged while nobody reads, and how the stream ended.

    The connection puts, one reader takes. Memory is bounded by the length of the answer. It
    outlives the connection if the stream is resumed on another.

    Attributes:
        stream_id: its name on the connection that carries it.
        is_cancelled: whether a cancel was asked for, sent or not.
        lost_s: loop time when its connection was lost, until it goes on; else None.
        lost_seq: the number of the last delta when that happened, the last time.
        num_resumes: how often it has gone on.
        on_credit: told how many deltas the reader has taken, now and then.
        accepted: the server's message, once it has come.
        done: the server's last message, if the stream ended well.
        last_arrival_s: loop time of the last message; of the start, before there is one.
    """

    def __init__(self, stream_id: str) -> None:
        self.stream_id = stream_id
        self.accepted: Accepted | None = None
        self.done: Done | None = None
        self.last_arrival_s = asyncio.get_running_loop().time()
        self.is_cancelled = False
        self.lost_s: float | None = None
        self.lost_seq = -2  # less than what it has before the first delta
        self.num_resumes = 0
        self.on_credit: Callable[[StreamInbox, int], None] | None = None
        self._next_seq = 0
        self._may_jump = False  # the next delta may stand for several
        self._num_allowed = CREDITS  # deltas that may yet come
        self._num_unread = 0
        self._num_uncredited = 0
        self._num_unread_chars = 0
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._error: HeadraceError | None = None
        self._discards = False
        self._changed = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        return self.done is not None or self._error is not None

    @property
    def has_output(self) -> bool:
        """Whether any delta has arrived."""
        return self._next_seq > 0

    @property
    def last_seq(self) -> int:
        """The number of the last delta that has arrived; -1 before the first."""
        return self._next_seq - 1

    @property
    def resume_token(self) -> str | None:
        """What it takes to go on with it on another connection, if that is possible."""
        if self.accepted is None or self.has_ended:
            return None
        return self.accepted.resume_token

    def put(self, message: Accepted | Resumed | Delta | Done | ServerError) -> None:
        """Add a message of the server.

        Raises:
            ProtocolError: it is not what may come next.
        """
        self.last_arrival_s = asyncio.get_running_loop().time()
        match message:
            case Accepted():
                if self.accepted is not None or self.has_output:
                    raise ProtocolError(f"stream {self.stream_id!r} was accepted twice")
                self.accepted = message
            case Resumed():
                self.lost_s = None
                self.num_resumes += 1
                self._may_jump = True
                self._num_allowed = CREDITS
                self._num_uncredited = -self._num_unread  # its credits were granted anew
            case Delta():
                if not (self._may_jump and message.seq > self._next_seq):
                    self._check_seq(message.seq)
                self._may_jump = False
                self._check_size(len(message.text))
                self._next_seq = message.seq + 1
                self._num_unread += 1
                if not self._discards:
                    self._texts.append(message.text)
                    self._token_ids.extend(message.token_ids or ())
                    self._logprobs.extend(message.logprobs or ())
            case Done():
                self._check_seq(message.seq)
                self.done = message
            case ServerError():
                self.fail(self._as_exception(message))
        self._changed.set()

    def fail(self, error: HeadraceError) -> None:
        """End the stream with an error, unless it has ended."""
        if not self.has_ended:
            self._error = error
            self._changed.set()

    def discard(self) -> None:
        """Forget what arrived, and whatever comes: nobody will read it."""
        self._discards = True
        self._clear()

    async def wait_accepted(self) -> None:
        """Return when the request was accepted, or ended by a cancel. Cancelling is safe.

        Raises:
            HeadraceError: the stream ended with it before it was accepted.
        """
        while self.accepted is None and not self.has_ended:
            await self._wait()
        if self.accepted is None and self._error is not None:
            raise self._error

    async def take(self) -> TextDelta | None:
        """Return all that is new, or None at the end. Cancelling is safe: nothing is lost.

        Raises:
            HeadraceError: the stream ended with it, and all before it was taken.
        """
        while not self._texts and not self.has_ended:
            await self._wait()
        if self._texts:
            delta = TextDelta(
                text="".join(self._texts),
                token_ids=tuple(self._token_ids),
                logprobs=tuple(self._logprobs),
            )
            self._clear()
            self._grant_credit()
            return delta
        if self._error is not None:
            raise self._error
        return None

    def _clear(self) -> None:
        self._num_unread_chars = 0
        self._texts.clear()
        self._token_ids.clear()
        self._logprobs.clear()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _grant_credit(self) -> None:
        """Let the server send on once enough was read."""
        self._num_uncredited += self._num_unread
        self._num_unread = 0
        if self.on_credit is not None and self._num_uncredited >= CREDIT_BATCH:
            num_credits, self._num_uncredited = self._num_uncredited, 0
            self._num_allowed += num_credits
            # It may have waited for us: the silence until now says nothing about it.
            self.last_arrival_s = asyncio.get_running_loop().time()
            self.on_credit(self, num_credits)

    def _check_size(self, num_chars: int) -> None:
        """Count a delta; whatever the server does, what it can make us hold is bounded.

        A cancel lifts the limit, and a server that stops sends what it has in any case.
        """
        self._num_allowed -= 1
        if self._num_allowed < -CREDITS and not self.is_cancelled:
            raise ProtocolError(f"more of stream {self.stream_id!r} came than was asked for")
        if not self._discards:
            self._num_unread_chars += num_chars
        if self._num_unread_chars > MAX_UNREAD_CHARS:
            raise ProtocolError(f"too much of stream {self.stream_id!r} came at a time")

    def _check_seq(self, seq: int) -> None:
        if seq != self._next_seq:
            raise ProtocolError(
                f"stream {self.stream_id!r} continued at {seq} instead of {self._next_seq}"
            )

    def _as_exception(self, error: ServerError) -> HeadraceError:
        if error.code in _RESUME_ERRORS:
            return ConnectionLost(
                f"the stream could not be resumed: {error.message}", code=None, retry_after_s=None
            )
        kind = rejection(error.status) if self.accepted is None else GenerationFailed
        return kind(
            error.message,
            status=error.status,
            type=error.type,
            param=error.param,
            code=error.code,
            retry_after_s=error.retry_after_s,
        )
