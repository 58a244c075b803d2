"""Server-sent events, byte for byte as OpenAI's clients and load tools parse them.

For them never an `id:` line and never an empty event: a stock client would then take the keep-alive
comment for an event without data, and die. Only our own endpoint has named events with ids.
"""

import asyncio
from collections.abc import Coroutine, Iterable

from aiohttp import web

from gateway.write_room import has_room

__all__ = ["DONE", "EventStream", "SlowReaderError", "escape_line_ends", "event"]


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

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
    data = escape_line_ends(data)
    head = b"" if name is None else f"event: {name}\n".encode()
    if event_id is not None:
        head += b"id: %d\n" % event_id
    return head + b"data: " + data + b"\n\n"


def escape_line_ends(data: bytes) -> bytes:
    """Return JSON without the line ends that JSON allows in strings."""
    if not data.isascii():
        for char, escaped in _LINE_ENDS:
            data = data.replace(char, escaped)
    return data


class EventStream:
    """One answer as server-sent events.

    Memory for a client that does not read is bounded by the socket buffers: the caller reads its
    source no further until there is room again, and after `send_timeout_s` the connection is cut.
    """

    def __init__(self, request: web.Request, *, send_timeout_s: float) -> None:
        self._request = request
        self._send_timeout_s = send_timeout_s
        self._is_chunked = False
        self._transport: asyncio.Transport | None = None
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )

    async def open(self) -> None:
        await self.response.prepare(self._request)
        self._is_chunked = "Transfer-Encoding" in self.response.headers
        self._transport = self._request.transport

    def put(self, events: bytes) -> bool:
        """Send whole events without waiting; return whether more may be put before `make_room`.

        Straight to the transport, for aiohttp's way there costs as much as the rest of an event.

        Raises:
            ConnectionError: the client is gone.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._is_chunked else events)
        return has_room(transport)

    async def make_room(self) -> None:
        """Wait until the client has taken most of what was put.

        Raises:
            SlowReaderError: it does not read.
        """
        await self._within_deadline(self._request.writer.drain())

    async def send(self, events: Iterable[bytes]) -> None:
        """Send whole events, and wait while there is no room for more; raises as both."""
        if not self.put(b"".join(events)):
            await self.make_room()

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
