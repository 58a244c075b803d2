"""What waits to be sent on one websocket, and in which order it goes.

One writer takes from an `Outbox`; everybody else only puts into it, and putting never blocks. Per
stream there is one mailbox whose content merges, so a reader that does not read costs memory only
for the output of its own open streams, and their number is capped.

Owns: the order of messages, `seq`, and which stream ids are in use. Never: touches a socket.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET

from gateway.messages import Delta, Done, Error, ServerMessage

__all__ = ["MAX_WAITING_REPLIES", "Close", "Outbox", "PongFrame"]

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


@dataclass(slots=True)
class _Mailbox:
    """Output of one stream that the writer has not taken yet."""

    with_token_ids: bool
    next_seq: int = 0
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    last: Done | Error | None = None
    is_ready: bool = False  # its id is in the writer's queue

    def take_delta(self, stream_id: str) -> Delta:
        delta = Delta(
            id=stream_id,
            seq=self.next_seq,
            text="".join(self.texts),
            token_ids=list(self.token_ids) if self.with_token_ids else UNSET,
        )
        self.next_seq += 1
        self.texts.clear()
        self.token_ids.clear()
        return delta


class Outbox:
    """Messages of one connection: control messages first, then the streams in turn."""

    def __init__(self) -> None:
        self._control: deque[ServerMessage | PongFrame] = deque()
        self._mailboxes: dict[str, _Mailbox] = {}
        self._ready: deque[str] = deque()
        self._close: Close | None = None
        self._wakeup = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()

    @property
    def num_streams(self) -> int:
        """Streams whose last message the writer has not taken."""
        return len(self._mailboxes)

    def is_open(self, stream_id: str) -> bool:
        return stream_id in self._mailboxes

    def open_stream(self, stream_id: str, *, with_token_ids: bool) -> None:
        """Begin a stream; its id is in use until the writer has taken its last message."""
        self._mailboxes[stream_id] = _Mailbox(with_token_ids=with_token_ids)

    def put_control(self, message: ServerMessage | PongFrame) -> None:
        """Add a message that goes before all stream output."""
        if self._close is None:
            self._control.append(message)
            if len(self._control) >= MAX_WAITING_REPLIES:
                self._has_room.clear()
            self._wakeup.set()

    def put_delta(self, stream_id: str, text: str, token_ids: tuple[int, ...]) -> None:
        """Add output of an open stream; it merges with what still waits."""
        mailbox = self._mailboxes[stream_id]
        if text:
            mailbox.texts.append(text)
        if mailbox.with_token_ids:
            mailbox.token_ids.extend(token_ids)
        if mailbox.texts or mailbox.token_ids:
            self._mark_ready(stream_id, mailbox)

    def put_last(self, stream_id: str, message: Done | Error) -> None:
        """End an open stream, once; the `seq` of a `done` is filled in when it is taken."""
        mailbox = self._mailboxes.get(stream_id)
        if mailbox is not None and mailbox.last is None:
            mailbox.last = message
            self._mark_ready(stream_id, mailbox)

    def close(self, code: int, reason: str) -> None:
        """Send what is there, then close; nothing more is accepted. The first call counts."""
        if self._close is None:
            self._close = Close(code, reason)
            self._wakeup.set()
            self._has_room.set()

    async def wait_for_room(self) -> None:
        """Return once few enough replies wait; the reader calls it before it reads on."""
        await self._has_room.wait()

    async def take(self) -> ServerMessage | PongFrame | Close:
        """Return the next thing to send. Cancelling is safe: nothing is taken."""
        while not self._control and not self._ready and self._close is None:
            self._wakeup.clear()
            await self._wakeup.wait()
        if self._control:
            message = self._control.popleft()
            if len(self._control) < MAX_WAITING_REPLIES // 2:
                self._has_room.set()
            return message
        if self._ready:
            return self._take_from(self._ready.popleft())
        assert self._close is not None
        return self._close

    def _mark_ready(self, stream_id: str, mailbox: _Mailbox) -> None:
        if not mailbox.is_ready:
            mailbox.is_ready = True
            self._ready.append(stream_id)
            self._wakeup.set()

    def _take_from(self, stream_id: str) -> ServerMessage:
        mailbox = self._mailboxes[stream_id]
        mailbox.is_ready = False
        if mailbox.texts or mailbox.token_ids:
            delta = mailbox.take_delta(stream_id)
            if mailbox.last is not None:
                # At the end of the queue: the other streams have their turn first.
                self._mark_ready(stream_id, mailbox)
            return delta
        assert mailbox.last is not None
        del self._mailboxes[stream_id]
        if isinstance(mailbox.last, Done):
            return msgspec.structs.replace(mailbox.last, seq=mailbox.next_seq)
        return mailbox.last
