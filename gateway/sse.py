"""Server-sent events, byte for byte as OpenAI's clients and load tools parse them.

For them never an `id:` line and never an empty event: a stock client would then take the keep-alive
comment for an event without data, and die. Only our own endpoint has named events with ids.
"""

import asyncio
from collections.abc import Coroutine, Iterable

from aiohttp import web

__all__ = ["DONE", "EventStream", "SlowReaderError", "event"]


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

# A write to an empty buffer waits for nobody unless it fills it: beyond 64 KiB.
MAX_UNTIMED_BYTES = 16 * 1024

# JSON leaves these as they are, but clients that split text at any line end would cut there.
_LINE_ENDS = tuple(
    (char.encode(), f"\\u{ord(char):04x}".encode()) for char in ("\x85", "\u2028", "\u2029")
)


class SlowReaderError(ConnectionError):
    """The client accepted no byte for too long; the connection is gone."""


def event(data: bytes, *, name: str | None = None, event_id: int | None = None) -> bytes:
    """Return the event that carries this JSON text; the name is ours and has no line ends.

    A client that lost its connection sends the last `event_id` back as Last-Event-ID.
    """
    for char, escaped in _LINE_ENDS:
        if char in data:
            data = data.replace(char, escaped)
    head = b"" if name is None else f"event: {name}\n".encode()
    if event_id is not None:
        head += b"id: %d\n" % event_id
    return head + b"data: " + data + b"\n\n"


class EventStream:
    """One answer as server-sent events.

    Memory for a client that does not read is bounded by the socket buffers: a write waits, the
    caller stops reading its source, and after `send_timeout_s` the connection is cut.
    """

    def __init__(self, request: web.Request, *, send_timeout_s: float) -> None:
        self._request = request
        self._send_timeout_s = send_timeout_s
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )

    async def open(self) -> None:
        await self.response.prepare(self._request)

    async def send(self, events: Iterable[bytes]) -> None:
        """Send whole events.

        Raises:
            SlowReaderError: the client does not read.
            ConnectionError: the client is gone.
        """
        data = b"".join(events)
        sending = self.response.write(data)
        transport = self._request.transport
        if (
            len(data) <= MAX_UNTIMED_BYTES
            and transport is not None
            and transport.get_write_buffer_size() == 0
        ):
            await sending  # which has no reason to wait: a timer for each token would be dear
        else:
            await self._within_deadline(sending)

    async def send_keep_alive(self) -> None:
        await self.send([KEEP_ALIVE])

    async def close(self) -> None:
        await self._within_deadline(self.response.write_eof())

    async def _within_deadline(self, sending: Coroutine[None, None, None]) -> None:
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await sending
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise SlowReaderError("the client does not read its answer") from None
