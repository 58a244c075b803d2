"""The open websockets, whatever they carry: how many there may be, and their end at a stop."""

import asyncio
from typing import Protocol

from aiohttp import web

from gateway.app_keys import CONFIG, METRICS
from gateway.errors import Unavailable

__all__ = [
    "DRAINING",
    "RETRY_AFTER_S",
    "STREAM_CONNECTIONS",
    "begin_drain",
    "check_room",
    "close_all",
    "serve_connection",
]

RETRY_AFTER_S = 5.0
SHUTDOWN_REASON = "the server is shutting down"


class Connection(Protocol):
    """One open websocket."""

    async def run(self) -> None:
        """Serve until it ends, for whatever reason; nothing of it is left running."""
        ...

    def drain(self, reason: str) -> None:
        """Tell the client that the end is near; what runs goes on, nothing new begins."""
        ...

    def shut_down(self, reason: str) -> None:
        """Say goodbye and close once that is sent. Does not wait."""
        ...

    async def wait_ended(self) -> None:
        """Return when `run` is over."""
        ...

    def cut(self) -> None:
        """Drop it without a word."""
        ...


STREAM_CONNECTIONS: web.AppKey[set[Connection]] = web.AppKey("STREAM_CONNECTIONS")
DRAINING: web.AppKey[asyncio.Event] = web.AppKey("DRAINING", asyncio.Event)  # set once we do


def check_room(app: web.Application) -> None:
    """Refuse a websocket before its upgrade if too many are open.

    Raises:
        Unavailable: there are.
    """
    if len(app[STREAM_CONNECTIONS]) >= app[CONFIG].ws_max_connections:
        raise Unavailable(
            "too many websockets are open", code="too_many_connections", retry_after_s=RETRY_AFTER_S
        )


async def serve_connection(app: web.Application, connection: Connection) -> None:
    """Run a connection, counted while it is open."""
    connections = app[STREAM_CONNECTIONS]
    connections.add(connection)
    try:
        if app[DRAINING].is_set():
            connection.drain(SHUTDOWN_REASON)
        with app[METRICS].websockets_open.track_inprogress():
            await connection.run()
    finally:
        connections.discard(connection)


def begin_drain(app: web.Application) -> None:
    """Send goaway on every connection, before the time in which running streams may finish."""
    app[DRAINING].set()
    for connection in app[STREAM_CONNECTIONS]:
        connection.drain(SHUTDOWN_REASON)


async def close_all(app: web.Application, reason: str = SHUTDOWN_REASON) -> None:
    """End every connection: goaway, a last message for each open stream, close 1012.

    For `on_shutdown`. Connections that do not take it in time are cut.
    """
    open_connections = app[STREAM_CONNECTIONS]
    connections = list(open_connections)
    for connection in connections:
        connection.shut_down(reason)
    try:
        async with asyncio.timeout(app[CONFIG].ws_close_timeout_s):
            for connection in connections:
                await connection.wait_ended()
    except TimeoutError:
        for connection in connections:
            connection.cut()
