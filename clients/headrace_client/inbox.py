"""What has arrived for one stream and was not read yet."""

import asyncio
from dataclasses import dataclass

from headrace_client.errors import (
    GenerationFailed,
    HeadraceError,
    ProtocolError,
    rejection,
)
from headrace_client.messages import Accepted, Delta, Done, ServerError

__all__ = ["StreamInbox", "TextDelta"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDelta:
    """New text of an answer; `token_ids` is empty unless the ids were asked for."""

    text: str
    token_ids: tuple[int, ...] = ()


class StreamInbox:
    """Deltas of one stream, merged while nobody reads, and how the stream ended.

    The connection puts, one reader takes. Memory is bounded by the length of the answer.

    Attributes:
        accepted: the server's message, once it has come.
        done: the server's last message, if the stream ended well.
        last_arrival_s: loop time of the last message; of the start, before there is one.
    """

    def __init__(self, stream_id: str) -> None:
        self.stream_id = stream_id
        self.accepted: Accepted | None = None
        self.done: Done | None = None
        self.last_arrival_s = asyncio.get_running_loop().time()
        self._next_seq = 0
        self._texts: list[str] = []
        self._token_ids: list[int] = []
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

    def put(self, message: Accepted | Delta | Done | ServerError) -> None:
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
            case Delta():
                self._check_seq(message.seq)
                self._next_seq += 1
                if not self._discards:
                    self._texts.append(message.text)
                    self._token_ids.extend(message.token_ids or ())
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
        self._texts.clear()
        self._token_ids.clear()

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
            delta = TextDelta(text="".join(self._texts), token_ids=tuple(self._token_ids))
            self._texts.clear()
            self._token_ids.clear()
            return delta
        if self._error is not None:
            raise self._error
        return None

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _check_seq(self, seq: int) -> None:
        if seq != self._next_seq:
            raise ProtocolError(
                f"stream {self.stream_id!r} continued at {seq} instead of {self._next_seq}"
            )

    def _as_exception(self, error: ServerError) -> HeadraceError:
        kind = rejection(error.status) if self.accepted is None else GenerationFailed
        return kind(
            error.message,
            status=error.status,
            type=error.type,
            param=error.param,
            code=error.code,
            retry_after_s=error.retry_after_s,
        )
