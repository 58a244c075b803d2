"""One websocket to a server, shared by many streams."""

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import aiohttp
from aiohttp import WSMsgType

from headrace_client.errors import (
    ConnectFailed,
    ConnectionLost,
    ConnectTimeout,
    HeadraceError,
    ProtocolError,
    rejection,
)
from headrace_client.inbox import CREDITS, StreamInbox
from headrace_client.messages import (
    Accepted,
    Delta,
    Done,
    Goaway,
    Hello,
    Resumed,
    ServerError,
)
from headrace_client.wire import (
    Encoding,
    cancel_message,
    credit_message,
    resume_message,
    start_message,
)

__all__ = ["Connection"]

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
HEARTBEAT_S = 20.0
CLOSE_TIMEOUT_S = 3.0
# A merged delta holds at most one whole answer, and of log-probabilities a few megabytes.
MAX_MESSAGE_BYTES = 32 * 1024 * 1024


class Connection:
    """Reads in one task and writes in another, so that no stream waits for the socket.

    `on_lost` gets the open streams that can be resumed, once, if the connection is lost; all other
    open streams end with an error.

    Owns: the socket, the stream ids in use, and the inboxes behind them.
    """

    def __init__(
        self,
        ws: "aiohttp.ClientWebSocketResponse[bool]",
        encoding: Encoding,
        hello: Hello,
        on_lost: Callable[[Sequence[StreamInbox], ConnectionLost], None] | None = None,
    ) -> None:
        self.hello = hello
        self._on_lost = on_lost
        self._ws = ws
        self._encoding = encoding
        self._inboxes: dict[str, StreamInbox] = {}
        self._num_started = 0
        self._outgoing: deque[bytes] = deque()
        self._has_outgoing = asyncio.Event()
        self._goaway: Goaway | None = None
        self._ended = False
        self._tasks = (asyncio.create_task(self._read()), asyncio.create_task(self._write()))

    @classmethod
    async def open(
        cls,
        session: aiohttp.ClientSession,
        url: str,
        encoding: Encoding,
        *,
        timeout_s: float | None,
        on_lost: Callable[[Sequence[StreamInbox], ConnectionLost], None] | None = None,
    ) -> Self:
        """Connect and wait for the server's hello. Cancelling is safe: the socket is closed.

        Raises:
            ConnectFailed: nobody answers, or not in this protocol.
            ConnectTimeout: it took longer than `timeout_s`.
            Unavailable, Overloaded: the server is there and takes no connections now.
            NotAllowed: it wants an API key, or another one.
        """
        try:
            async with asyncio.timeout(timeout_s):
                ws = await session.ws_connect(
                    url,
                    protocols=(encoding.subprotocol,),
                    heartbeat=HEARTBEAT_S,
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_TIMEOUT_S),
                    max_msg_size=MAX_MESSAGE_BYTES,
                    decode_text=False,
                )
                try:
                    hello = await _receive_hello(ws, encoding)
                except BaseException:
                    await ws.close()
                    raise
        except TimeoutError:
            raise ConnectTimeout(f"no answer from {url} within {timeout_s:g} s") from None
        except aiohttp.WSServerHandshakeError as error:
            if error.status in (401, 403):
                raise rejection(error.status)(
                    f"the server at {url} wants "
                    + ("an API key that it knows" if error.status == 401 else "another API key"),
                    status=error.status,
                    type="authentication_error" if error.status == 401 else "permission_error",
                    param=None,
                    code=None,
                    retry_after_s=None,
                ) from None
            if error.status in (429, 503):
                raise rejection(error.status)(
                    f"the server at {url} takes no connections now",
                    status=error.status,
                    type="service_unavailable_error",
                    param=None,
                    code=None,
                    retry_after_s=_retry_after(error.headers),
                ) from None
            raise ConnectFailed(
                f"{url} does not serve this protocol (HTTP {error.status})"
            ) from None
        except aiohttp.InvalidURL:
            raise ConnectFailed(f"{url} is not an address that can be connected to") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ConnectFailed(f"no server answers at {url}: {_reason(error)}") from None
        return cls(ws, encoding, hello, on_lost)

    @property
    def takes_streams(self) -> bool:
        """Whether new streams can be started here."""
        return not self._ended and self._goaway is None and not self._ws.closed

    @property
    def has_ended(self) -> bool:
        """Whether no stream of this connection is left."""
        return self._ended

    def start(self, request: Mapping[str, object], *, return_token_ids: bool) -> StreamInbox:
        """Send a start message and return where its answers arrive.

        Raises:
            TypeError, ValueError, OverflowError: the request cannot be encoded.
        """
        stream_id = self._new_id()
        message = start_message(
            stream_id,
            request,
            return_token_ids=return_token_ids,
            credits=CREDITS,
            resumable=self._on_lost is not None,
        )
        self._post(message)
        inbox = self._inboxes[stream_id] = StreamInbox(stream_id)
        inbox.on_credit = self._send_credit
        return inbox

    def resume(self, inbox: StreamInbox) -> None:
        """Go on with a stream of another connection that was lost; it has a resume token."""
        assert inbox.resume_token is not None
        inbox.stream_id = self._new_id()
        inbox.on_credit = self._send_credit
        self._inboxes[inbox.stream_id] = inbox
        self._post(
            resume_message(
                inbox.stream_id, inbox.resume_token, after=inbox.last_seq, credits=CREDITS
            )
        )
        if inbox.is_cancelled:
            self.cancel(inbox.stream_id)

    def carries(self, inbox: StreamInbox) -> bool:
        """Whether this stream is open here."""
        return self._inboxes.get(inbox.stream_id) is inbox

    def cancel(self, stream_id: str) -> None:
        """Send a cancel message for a stream that has not ended."""
        if stream_id in self._inboxes and not self._ended:
            self._post(cancel_message(stream_id))

    def end(self) -> None:
        """End the streams that are still open with ConnectionLost; `close` has to follow."""
        self._end(ConnectionLost("the client was closed", code=None, retry_after_s=None))

    async def close(self) -> None:
        """Close the socket; streams that are still open end with ConnectionLost."""
        self.end()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(OSError, aiohttp.ClientError):
            await self._ws.close()

    # ---- inside --------------------------------------------------------------------------------

    def _new_id(self) -> str:
        self._num_started += 1
        return f"s{self._num_started}"

    def _send_credit(self, inbox: StreamInbox, num_credits: int) -> None:
        if self.carries(inbox) and not self._ended:
            self._post(credit_message(inbox.stream_id, num_credits))

    def _post(self, message: Mapping[str, object]) -> None:
        self._outgoing.append(self._encoding.encode(message))
        self._has_outgoing.set()

    async def _write(self) -> None:
        frame_type = WSMsgType.TEXT if self._encoding.is_text else WSMsgType.BINARY
        # The reader learns why when sending fails, and tells the streams.
        with contextlib.suppress(OSError, aiohttp.ClientError):
            while True:
                while not self._outgoing:
                    self._has_outgoing.clear()
                    await self._has_outgoing.wait()
                await self._ws.send_frame(self._outgoing.popleft(), frame_type)

    async def _read(self) -> None:
        try:
            while (frame := await self._ws.receive()).type in (WSMsgType.TEXT, WSMsgType.BINARY):
                self._handle(frame.data)
        except ProtocolError as error:
            self._end(error)
            await self._ws.close(code=aiohttp.WSCloseCode.PROTOCOL_ERROR)
            return
        except Exception as error:  # whatever broke the socket, every stream hears of it
            logger.debug("the websocket broke", exc_info=True)
            self._lose(self._connection_lost(f"{error}"))
            return
        self._lose(self._connection_lost(self._goaway.reason if self._goaway else ""))

    def _handle(self, data: bytes) -> None:
        message = self._encoding.decode(data)
        match message:
            case Accepted() | Resumed() | Delta() | Done():
                self._put(message.id, message)
            case ServerError(id=str(stream_id)):
                self._put(stream_id, message)
            case ServerError(code="unknown_id"):
                pass  # a cancel and the stream's last message crossed
            case ServerError():
                raise ProtocolError(f"the server refused a frame: {message.message}")
            case Goaway():
                self._goaway = message
            case _:
                pass

    def _put(
        self, stream_id: str, message: Accepted | Resumed | Delta | Done | ServerError
    ) -> None:
        inbox = self._inboxes.get(stream_id)
        if inbox is None:
            raise ProtocolError(f"the server sent to {stream_id!r}, which is no open stream")
        if isinstance(message, Done | ServerError):
            del self._inboxes[stream_id]
        try:
            inbox.put(message)
        except ProtocolError as error:
            inbox.fail(error)
            raise

    def _connection_lost(self, reason: str) -> ConnectionLost:
        code = self._ws.close_code
        text = "the connection to the server was lost"
        if reason:
            text = f"{text}: {reason}"
        retry_after_s = self._goaway.retry_after_s if self._goaway else None
        return ConnectionLost(text, code=code, retry_after_s=retry_after_s)

    def _lose(self, error: ConnectionLost) -> None:
        """Hand over what can be resumed; end the rest."""
        lost = [inbox for inbox in self._inboxes.values() if inbox.resume_token is not None]
        if self._on_lost is None or self._ended:
            lost = []
        for inbox in lost:
            del self._inboxes[inbox.stream_id]
        self._end(error)
        if lost and self._on_lost is not None:
            self._on_lost(lost, error)

    def _end(self, error: HeadraceError) -> None:
        self._ended = True
        for inbox in self._inboxes.values():
            inbox.fail(error)
        self._inboxes.clear()
        self._outgoing.clear()


async def _receive_hello(ws: "aiohttp.ClientWebSocketResponse[bool]", encoding: Encoding) -> Hello:
    if ws.protocol != encoding.subprotocol:
        raise ConnectFailed(f"the server does not speak {encoding.subprotocol}")
    frame = await ws.receive()
    if frame.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
        raise ConnectFailed("the server closed the connection without a hello")
    try:
        hello = encoding.decode(frame.data)
    except ProtocolError as error:
        raise ConnectFailed(f"{error}") from None
    if not isinstance(hello, Hello):
        raise ConnectFailed("the server's first message is no hello")
    if hello.version != PROTOCOL_VERSION:
        raise ConnectFailed(f"the server speaks version {hello.version} of the protocol, not 1")
    return hello


def _reason(error: Exception) -> str:
    """Say in few words why connecting failed; the libraries' own texts repeat the address."""
    if isinstance(error, aiohttp.ClientConnectorError):
        errno = error.os_error.errno
        if errno is not None and errno > 0:  # else a name that cannot be looked up
            return os.strerror(errno)
        return error.os_error.strerror or str(error.os_error)
    return str(error) or type(error).__name__


def _retry_after(headers: "Mapping[str, str] | None") -> float | None:
    text = headers.get("Retry-After", "") if headers else ""
    # Only digits of ASCII are a number of seconds; isdigit alone also takes a superscript two.
    return float(text) if text.isascii() and text.isdigit() else None
