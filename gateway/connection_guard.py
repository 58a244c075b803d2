"""Closes connections whose clients are too slow to be served, before and after their requests.

aiohttp waits for ever for the rest of a request's head, and for a client to fetch an answer. Here
is what stands between it and the socket: it sees bytes come and writing stall, and is told when a
request has arrived. Bodies, event streams and websockets have their own, finer limits.
"""

import asyncio
from collections.abc import Callable
from typing import cast

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from gateway.config import GatewayConfig
from gateway.errors import GatewayError, RequestTimeout

__all__ = ["ConnectionGuard", "plain_response", "tell_guard"]

# By then whoever sends has given up by its own limit, with a better goodbye.
SEND_TIMEOUT_FACTOR = 2


class ConnectionGuard(asyncio.Protocol):
    """One connection, handed on to the protocol that serves it.

    Args:
        inner: aiohttp's protocol of this connection.
        config: `header_timeout_s` from the first byte of a head (or the beginning of the
            connection) to its end; `send_timeout_s` for a client to take anything.
        on_lost: told of itself when the connection is over.
    """

    def __init__(
        self,
        inner: asyncio.Protocol,
        config: GatewayConfig,
        *,
        on_lost: Callable[["ConnectionGuard"], None],
    ) -> None:
        self._inner = inner
        self._on_lost = on_lost
        self._header_timeout_s = config.header_timeout_s
        self._send_timeout_s = config.send_timeout_s * SEND_TIMEOUT_FACTOR
        self._transport: asyncio.Transport | None = None
        self._num_requests = 0  # whose heads have arrived and whose answers have not been made
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_began = False  # whether the timer runs since a byte of this head
        self._send_timer: asyncio.TimerHandle | None = None
        self._num_unsent_bytes = 0  # when the timer began

    @property
    def was_made(self) -> bool:
        """Whether there is, or was, a connection; not before the end of a TLS handshake."""
        return self._transport is not None

    def request_began(self) -> None:
        """A head is complete, and a handler begins."""
        self._num_requests += 1
        self._stop_head_timer()

    def request_ended(self) -> None:
        """The handler has ended; what is idle from now on is aiohttp's to close."""
        self._num_requests -= 1

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._start_head_timer()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if not self._num_requests and not self._head_began:
            self._start_head_timer()
            self._head_began = True
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._start_send_timer()
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._stop_send_timer()
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_send_timer()
        self._on_lost(self)
        self._inner.connection_lost(exc)

    # Timers.

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        loop = asyncio.get_running_loop()
        self._head_timer = loop.call_later(self._header_timeout_s, self._head_is_late)

    def _stop_head_timer(self) -> None:
        self._head_began = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        transport, began = self._transport, self._head_began
        self._stop_head_timer()
        if transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size():  # still sends the answer to the request before
            self._start_head_timer()
            return
        if began:
            error = RequestTimeout(
                f"the request's head did not arrive within {self._header_timeout_s:g} seconds"
            )
            transport.write(plain_response(error, "Request Timeout"))
        transport.close()

    def _start_send_timer(self) -> None:
        self._stop_send_timer()
        if self._transport is not None:
            self._num_unsent_bytes = self._transport.get_write_buffer_size()
            loop = asyncio.get_running_loop()
            self._send_timer = loop.call_later(self._send_timeout_s, self._sending_is_slow)

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _sending_is_slow(self) -> None:
        if self._transport is None:
            return
        if self._transport.get_write_buffer_size() < self._num_unsent_bytes:
            self._start_send_timer()  # slow, but it reads
        else:
            self._transport.abort()


@web.middleware
async def tell_guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tell the connection's guard that its request has arrived, and when that is served."""
    transport = request.transport
    guard = None if transport is None else transport.get_protocol()
    if not isinstance(guard, ConnectionGuard):
        return await handler(request)
    guard.request_began()
    try:
        return await handler(request)
    finally:
        guard.request_ended()


def plain_response(error: GatewayError, phrase: str) -> bytes:
    """Return a whole answer to a request that nobody has read, after which we close."""
    body = orjson.dumps({"error": error.to_wire()})
    headers = {
        "Content-Type": "application/json",
        **error.headers(),
        "Connection": "close",
        "Content-Length": str(len(body)),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {error.status} {phrase}\r\n{head}\r\n".encode() + body
