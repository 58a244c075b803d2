"""The open websockets, whatever they carry: how many, how fast, and their end at a stop."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from aiohttp import web

from gateway.app_keys import CONFIG, METRICS
from gateway.config import GatewayConfig
from gateway.errors import InvalidRequest, Unavailable

__all__ = [
    "DRAINING",
    "RETRY_AFTER_S",
    "SHUTDOWN_REASON",
    "STREAM_CONNECTIONS",
    "MessageRate",
    "accept_websocket",
    "begin_drain",
    "check_room",
    "close_all",
    "close_politely",
    "serve_connection",
]

RETRY_AFTER_S = 5.0
SHUTDOWN_REASON = "the server is shutting down"
IDLE_REASON = "nothing has run on this connection for long"
AGE_REASON = "this connection has been open for long"
LONGEST_LOOK_S = 60.0  # between two looks at whether a connection is idle, or old
BURST_S = 2.0  # of silence make up for as many messages more


class Connection(Protocol):
    """One open websocket."""

    @property
    def is_busy(self) -> bool:
        """Whether anything runs that its client waits for."""
        ...

    async def run(self) -> None:
        """Serve until it ends, for whatever reason; nothing of it is left running."""
        ...

    def drain(self, reason: str) -> None:
        """Tell the client that the end is near; what runs goes on, nothing new begins."""
        ...

    def retire(self, reason: str) -> None:
        """Take nothing new, and close once nothing runs; the client may come back at once."""
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


class MessageRate:
    """How fast the messages of one websocket are read: in bursts, but on average no faster.

    Args:
        max_per_s: messages in a second.
        clock: seconds.
    """

    def __init__(self, max_per_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = 1.0 / max_per_s
        self._clock = clock
        self._due_s = clock() - BURST_S

    async def wait(self) -> None:
        """Count a message that has come, and return when it is time to handle it.

        Until then the next ones wait in the socket, and so does the client.
        """
        now_s = self._clock()
        self._due_s = max(self._due_s, now_s - BURST_S) + self._interval_s
        if self._due_s > now_s:
            await asyncio.sleep(self._due_s - now_s)


def check_room(app: web.Application) -> None:
    """Refuse a websocket before its upgrade if too many are open.

    Raises:
        Unavailable: there are.
    """
    if len(app[STREAM_CONNECTIONS]) >= app[CONFIG].ws_max_connections:
        raise Unavailable(
            "too many websockets are open", code="too_many_connections", retry_after_s=RETRY_AFTER_S
        )


async def accept_websocket(
    request: web.Request, *, max_message_bytes: int, protocols: Sequence[str] = ()
) -> web.WebSocketResponse:
    """Answer the handshake of a websocket whose one writer also answers pings and closes it.

    Raises:
        InvalidRequest: it is none.
    """
    config = request.app[CONFIG]
    ws = web.WebSocketResponse(
        protocols=protocols,
        heartbeat=config.ws_heartbeat_s,
        timeout=config.ws_close_timeout_s,
        max_msg_size=max_message_bytes,
        compress=False,
        autoping=False,
        autoclose=False,  # what runs ends first
        decode_text=False,
    )
    try:
        await ws.prepare(request)
    except ValueError:  # from a key that is not even ASCII
        raise InvalidRequest("this is no handshake of a websocket", code="bad_http") from None
    return ws


async def serve_connection(app: web.Application, connection: Connection) -> None:
    """Run a connection, counted while it is open."""
    connections = app[STREAM_CONNECTIONS]
    connections.add(connection)
    try:
        if app[DRAINING].is_set():
            connection.drain(SHUTDOWN_REASON)
        watch = asyncio.create_task(_retire_in_time(connection, app[CONFIG]))
        try:
            with app[METRICS].websockets_open.track_inprogress():
                await connection.run()
        finally:
            watch.cancel()
    finally:
        connections.discard(connection)


async def _retire_in_time(connection: Connection, config: GatewayConfig) -> None:
    """Wait until a connection is old, or has been idle for long, and retire it."""
    loop = asyncio.get_running_loop()
    began_s = busy_s = loop.time()
    look_s = min(LONGEST_LOOK_S, config.ws_idle_timeout_s / 4, config.ws_max_age_s / 4)
    while True:
        await asyncio.sleep(look_s)
        now_s = loop.time()
        if connection.is_busy:
            busy_s = now_s
        if now_s - busy_s >= config.ws_idle_timeout_s:
            connection.retire(IDLE_REASON)
            return
        if now_s - began_s >= config.ws_max_age_s:
            connection.retire(AGE_REASON)
            return


def begin_drain(app: web.Application) -> None:
    """Send goaway on every connection, before the time in which running streams may finish."""
    app[DRAINING].set()
    for connection in app[STREAM_CONNECTIONS]:
        connection.drain(SHUTDOWN_REASON)


async def close_politely(
    ws: web.WebSocketResponse,
    reader: asyncio.Task[None],
    *,
    code: int,
    reason: str,
    drain: bool = True,
) -> None:
    """Send a close frame, and wait for the client's.

    The reader ends first. With somebody receiving, aiohttp drops the connection right behind the
    frame, and a client that has not read that yet, or answers it, finds the connection broken.

    Args:
        ws: the websocket; its own timeout bounds the wait.
        reader: the task that receives.
        code: of the close frame.
        reason: for people.
        drain: whether to wait until the client takes what was sent before.
    """
    reader.cancel()
    await asyncio.wait([reader])
    await ws.close(code=code, message=reason.encode(), drain=drain)


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
