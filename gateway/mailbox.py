"""What waits to be sent on one connection, and in which order it goes.

One writer takes from an `Outbox`; everybody else only puts, and putting never blocks. Each stream
has a `Mailbox` whose content merges, so a reader that does not read, or gives no credit, costs
memory only for the output of its own open streams, and their number is capped. A mailbox is not
bound to its outbox: that of a stream which can be resumed moves to the next connection.

Owns: the order of messages, credits, and which stream ids are in use. Never: touches a socket.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from gateway.messages import Accepted, Delta, Done, Error, Resumed, ServerMessage
from gateway.stream_buffer import StreamBuffer
from gateway.token_logprobs import TokenLogprob
from jaxengine.wakeup import Wakeup

__all__ = ["MAX_WAITING_REPLIES", "Close", "Mailbox", "Outbox", "PongFrame"]

# Answers to pings and to bad frames that may wait before the connection's reader has to.
MAX_WAITING_REPLIES = 64


@dataclass(frozen=True, slots=True)
class PongFrame:
    """Answer to a websocket ping frame."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Close:
    """The last thing to send."""

    code: int
    reason: str


class Mailbox:
    """Messages of one stream that no connection has taken yet.

    Attributes:
        stream_id: its name on the connection that carries it.
        buffer: its output.
        credits: deltas that may be sent; None for any number.
        is_known: whether a connection has taken the first message.
        on_end: called when a connection has taken the last message.
    """

    __slots__ = (
        "_first",
        "_is_queued",
        "_last",
        "_outbox",
        "_with_logprobs",
        "_with_token_ids",
        "buffer",
        "credits",
        "is_known",
        "on_end",
        "stream_id",
    )

    def __init__(
        self,
        stream_id: str,
        buffer: StreamBuffer,
        *,
        with_token_ids: bool,
        with_logprobs: bool = False,
        credits: int | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self.stream_id = stream_id
        self.buffer = buffer
        self.credits = credits
        self.is_known = False
        self.on_end = on_end
        self._with_token_ids = with_token_ids
        self._with_logprobs = with_logprobs
        self._first: Accepted | Resumed | None = None
        self._last: Done | Error | None = None
        self._outbox: Outbox | None = None
        self._is_queued = False

    @property
    def has_ended(self) -> bool:
        """Whether its last message is there, taken or not."""
        return self._last is not None

    def put_first(self, message: Accepted | Resumed) -> None:
        """Add the message that goes before all others."""
        self._first = message
        self._note_change()

    def put_delta(
        self, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()
    ) -> None:
        """Add output; it merges with what still waits."""
        self.buffer.put(text, token_ids if self._with_token_ids else (), logprobs)
        self._note_change()

    def put_last(self, message: Done | Error) -> None:
        """End the stream, once; `id` and `seq` are filled in when the message is taken."""
        if self._last is None:
            self._last = message
            self._note_change()

    def grant(self, num_credits: int) -> None:
        """Let so many more deltas be sent."""
        if self.credits is not None:
            self.credits += num_credits
            self._note_change()

    def lift_limit(self) -> None:
        """Let everything be sent, whatever the credits."""
        self.credits = None
        self._note_change()

    @property
    def can_send(self) -> bool:
        if self._first is not None:
            return True
        if self.buffer.num_unsent_bytes:
            return self.credits is None or self.credits > 0
        return self._last is not None

    def _note_change(self) -> None:
        if not self._is_queued and self._outbox is not None and self.can_send:
            self._outbox._queue(self)

    def _take(self) -> ServerMessage:
        """Return the next message; the caller has seen that there is one."""
        if self._first is not None:
            first, self._first = self._first, None
            self.is_known = True
            self._note_change()  # at the end of the queue: the others have their turn first
            return first
        if self.buffer.num_unsent_bytes:
            if self.credits is not None:
                self.credits -= 1
            seq, text, token_ids, logprobs = self.buffer.take()
            if self._last is not None:
                self._note_change()
            return Delta(
                id=self.stream_id,
                seq=seq,
                text=text,
                token_ids=token_ids if self._with_token_ids else UNSET,
                logprobs=logprobs if self._with_logprobs else UNSET,
            )
        assert self._last is not None
        if self._outbox is not None:
            self._outbox.detach(self)
        if self.on_end is not None:
            self.on_end()
        if isinstance(self._last, Done):
            return msgspec.structs.replace(self._last, id=self.stream_id, seq=self.buffer.next_seq)
        return msgspec.structs.replace(self._last, id=self.stream_id)


class Outbox:
    """Messages of one connection: control messages first, then the streams in turn.

    Attributes:
        wakeup: is set whenever there is something to take; for the one writer.
    """

    def __init__(self) -> None:
        self._control: deque[ServerMessage | PongFrame] = deque()
        self._mailboxes: dict[str, Mailbox] = {}
        self._ready: deque[Mailbox] = deque()
        self._close: Close | None = None
        self.wakeup = Wakeup()
        self._has_room = asyncio.Event()
        self._has_room.set()

    @property
    def num_streams(self) -> int:
        """Streams whose last message the writer has not taken."""
        return len(self._mailboxes)

    def mailbox(self, stream_id: str) -> Mailbox | None:
        """Return that of an open stream: the id is in use until the last message is taken."""
        return self._mailboxes.get(stream_id)

    def attach(self, mailbox: Mailbox) -> None:
        """Carry this stream, whose id is free."""
        self._mailboxes[mailbox.stream_id] = mailbox
        mailbox._outbox = self
        mailbox._note_change()

    def detach(self, mailbox: Mailbox) -> None:
        """Carry it no more; what it holds stays in it."""
        del self._mailboxes[mailbox.stream_id]
        mailbox._outbox = None
        if mailbox._is_queued:
            mailbox._is_queued = False
            self._ready.remove(mailbox)

    def put_control(self, message: ServerMessage | PongFrame) -> None:
        """Add a message that goes before all stream output."""
        if self._close is None:
            self._control.append(message)
            if len(self._control) >= MAX_WAITING_REPLIES:
                self._has_room.clear()
            self.wakeup.set()

    def close(self, code: int, reason: str) -> None:
        """Send what is there, then close; nothing more is accepted. The first call counts."""
        if self._close is None:
            self._close = Close(code, reason)
            self.wakeup.set()
            self._has_room.set()

    async def wait_for_room(self) -> None:
        """Return once few enough replies wait; the reader calls it before it reads on."""
        await self._has_room.wait()

    async def take(self) -> ServerMessage | PongFrame | Close:
        """Return the next thing to send. Cancelling is safe: nothing is taken."""
        while (item := self.take_now()) is None:
            await self.wakeup.wait()
        return item

    def take_now(self) -> ServerMessage | PongFrame | Close | None:
        """Return the next thing to send; None if there is none."""
        if self._control:
            message = self._control.popleft()
            if len(self._control) < MAX_WAITING_REPLIES // 2:
                self._has_room.set()
            return message
        return self.take_output() or self._close

    def take_output(self) -> ServerMessage | None:
        """Return the next message of a stream; None if there is none, or another goes before."""
        if self._control or not self._ready:
            return None
        mailbox = self._ready.popleft()
        mailbox._is_queued = False
        return mailbox._take()

    def _queue(self, mailbox: Mailbox) -> None:
        mailbox._is_queued = True
        if not self._ready:  # else the writer knows: it takes until nothing is left
            self.wakeup.set()
        self._ready.append(mailbox)
