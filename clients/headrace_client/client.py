"""The client: one object per server, one socket, many streams."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self, Unpack, get_args

import aiohttp

from headrace_client.connection import Connection
from headrace_client.errors import (
    ConnectFailed,
    ConnectionLost,
    HeadraceError,
    Overloaded,
    RequestRejected,
    Unavailable,
)
from headrace_client.inbox import StreamInbox
from headrace_client.messages import ChatMessage, GenerationOptions, Hello
from headrace_client.retry import backoff_s
from headrace_client.stream import Stream, Timeouts
from headrace_client.wire import ENCODINGS, EncodingName, request_body

__all__ = ["DEFAULT_URL", "AsyncClient"]

DEFAULT_URL = "http://127.0.0.1:8000"

logger = logging.getLogger(__name__)

# How long a lost stream is worth reconnecting for, if the server did not say.
DEFAULT_RESUME_TTL_S = 30.0
# Whatever the server says: for how long, how often in a row without anything new, and how long in
# between.
MAX_RESUME_TTL_S = 600.0
MAX_FAILURES = 30
MAX_RETRY_AFTER_S = 60.0

_NO_LIMITS = Timeouts(connect_s=None, first_token_s=None, idle_s=None, total_s=None)


class AsyncClient:
    """A headrace server, as seen from a program.

    ```
    async with AsyncClient("http://127.0.0.1:8000") as client:
        async with await client.chat("What is the capital of France?", temperature=0) as stream:
            async for delta in stream:
                print(delta.text, end="", flush=True)
        print(stream.usage, stream.timing)
    ```

    All streams share one websocket, opened by the first of them and again after it was lost.
    Streams that were open then go on, without a gap, as soon as the server can be reached again.
    The methods may be called from any number of tasks of one event loop.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        encoding: EncodingName = "json",
        timeout: Timeouts | float | None = Timeouts(),  # noqa: B008 (frozen)
        max_retries: int = 2,
        resume: bool = True,
    ) -> None:
        """Connect to nothing yet.

        Args:
            base_url: scheme, host and port of the server, and a path if it is mounted under one.
            api_key: for a server that has keys; it goes into a header, never into an address.
            encoding: how messages travel; "msgpack" is smaller, "json" can be read on the wire.
            timeout: time limits; a number limits the whole of each answer, None lifts all limits.
            max_retries: how often a request is sent again that was not accepted because the server
                could not be reached, or had no room; after a wait, and not before the server asks.
            resume: whether streams outlive a connection that is lost.

        Raises:
            ValueError: an argument is not one of those.
        """
        if encoding not in get_args(EncodingName):
            raise ValueError(f"encoding must be 'json' or 'msgpack', got {encoding!r}")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("an api_key has printable ASCII characters only")
        if timeout is None:
            timeout = _NO_LIMITS
        elif not isinstance(timeout, Timeouts):
            timeout = Timeouts(total_s=timeout)
        self._url = _stream_url(base_url)
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._encoding = ENCODINGS[encoding]
        self._timeouts = timeout
        self._max_retries = max_retries
        self._resume = resume
        self._lost: list[StreamInbox] = []  # that wait for a connection to go on with
        self._recovery: asyncio.Task[None] | None = None
        self._resume_ttl_s = DEFAULT_RESUME_TTL_S
        self._failure: HeadraceError | None = (
            None  # why there was no connection at the last attempt
        )
        self._num_failures = 0  # to go on, in a row
        self._num_closes = 0
        self._session: aiohttp.ClientSession | None = None
        # The last one takes new streams; before it are those that the server has said goodbye on.
        self._connections: list[Connection] = []
        self._connecting = asyncio.Lock()

    async def chat(
        self,
        messages: str | Sequence[ChatMessage],
        **options: Unpack[GenerationOptions],
    ) -> Stream:
        """Start the answer to a conversation, or to one user message.

        Returns when the server has accepted the request. Cancelling is safe: a request that was
        already sent is cancelled in the server.

        Raises:
            TypeError, ValueError: an option has an unknown name or cannot be sent.
            RequestRejected: the server refused it; see its subclasses.
            ConnectFailed: no server answers.
            GenerationTimeout, ConnectionLost, ProtocolError: as in `Stream`.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return await self._start(request_body(options, messages=messages), options)

    async def complete(
        self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]
    ) -> Stream:
        """Start the continuation of a text, or of token ids. Otherwise like `chat`."""
        return await self._start(request_body(options, prompt=prompt), options)

    async def hello(self) -> Hello:
        """Return what the server says about itself: its model and its limits.

        Raises:
            ConnectFailed, RequestRejected: no server answers, or it takes no connections now.
            ConnectionLost: the client was closed meanwhile.
        """
        return (await self._connect()).hello

    async def close(self) -> None:
        """Close the socket; streams that are still open end with ConnectionLost. Idempotent."""
        # First all that needs no waiting, so that nothing begins anew meanwhile.
        self._num_closes += 1
        connections, self._connections = self._connections, []
        session, self._session = self._session, None
        recovery, self._recovery = self._recovery, None
        for connection in connections:
            connection.end()
        self._give_up(_closed())
        if recovery is not None:
            recovery.cancel()
            await asyncio.gather(recovery, return_exceptions=True)
        for connection in connections:
            await connection.close()
        if session is not None:
            await session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _start(self, request: Mapping[str, object], options: GenerationOptions) -> Stream:
        loop = asyncio.get_running_loop()
        total_s = self._timeouts.total_s
        end_s = float("inf") if total_s is None else loop.time() + total_s
        num_closes = self._num_closes
        attempt = 0
        while True:
            try:
                return await self._start_once(request, options)
            except (ConnectFailed, ConnectionLost, RequestRejected) as error:
                attempt += 1
                retry_after_s = getattr(error, "retry_after_s", None)
                delay_s = backoff_s(attempt, retry_after_s)
                may_try = attempt <= self._max_retries and num_closes == self._num_closes
                may_try = may_try and (retry_after_s or 0.0) <= MAX_RETRY_AFTER_S
                if not (may_try and _may_pass(error)) or loop.time() + delay_s >= end_s:
                    raise
                logger.debug("trying again in %.1f s: %s", delay_s, error)
                await asyncio.sleep(delay_s)
                if num_closes != self._num_closes:
                    raise

    async def _start_once(
        self, request: Mapping[str, object], options: GenerationOptions
    ) -> Stream:
        connection = await self._connect()
        inbox = connection.start(
            request, return_token_ids=bool(options.get("return_token_ids", False))
        )
        stream = Stream(inbox, self._timeouts, lambda _: self._cancel(inbox))
        try:
            await stream.wait_accepted()
        except BaseException:
            stream.abandon()
            raise
        return stream

    def _cancel(self, inbox: StreamInbox) -> None:
        inbox.is_cancelled = True  # sent with the resume if its connection is lost now
        for connection in self._connections:
            if connection.carries(inbox):
                connection.cancel(inbox.stream_id)

    def _take_lost(self, inboxes: Sequence[StreamInbox], error: ConnectionLost) -> None:
        """Go on with these streams of a connection that was lost, on another one."""
        logger.debug("%d streams go on after: %s", len(inboxes), error)
        now_s = asyncio.get_running_loop().time()
        # If nothing had come since the last time, this connection was as good as none.
        self._note_failure(error, in_a_row=all(i.last_seq <= i.lost_seq for i in inboxes))
        for inbox in inboxes:
            inbox.lost_seq = inbox.last_seq
            if inbox.lost_s is None:
                inbox.lost_s = now_s
        self._lost.extend(inboxes)
        if self._recovery is None or self._recovery.done():
            self._recovery = asyncio.create_task(self._recover())

    async def _recover(self) -> None:
        """Connect, however often it takes, until the server has given up the lost streams."""
        while await self._wait_to_recover():
            try:
                connection = await self._connect()
            except HeadraceError as error:
                self._note_failure(error, in_a_row=True)
                continue
            lost, self._lost = self._lost, []
            for inbox in lost:
                if inbox.resume_token is not None:
                    connection.resume(inbox)

    def _note_failure(self, error: HeadraceError, *, in_a_row: bool) -> None:
        self._failure = error
        self._num_failures = self._num_failures + 1 if in_a_row else 0

    async def _wait_to_recover(self) -> bool:
        """Wait before the next attempt; return whether there is anything to go on with.

        The first one comes at once, unless the server said when.
        """
        if not self._lost:
            return False
        retry_after_s = getattr(self._failure, "retry_after_s", None)
        delay_s = 0.0
        if self._num_failures or retry_after_s is not None:
            delay_s = backoff_s(max(1, self._num_failures), retry_after_s)
        next_s = asyncio.get_running_loop().time() + delay_s
        if self._num_failures > MAX_FAILURES:
            next_s = float("inf")
        reason = f"{self._failure}"
        if not isinstance(self._failure, ConnectionLost):
            reason = f"the connection to the server was lost: {reason}"
        given_up = ConnectionLost(reason, code=None, retry_after_s=None)
        self._give_up(given_up, lost_before_s=next_s - self._resume_ttl_s)
        if self._lost:
            await asyncio.sleep(delay_s)
        return bool(self._lost)

    def _give_up(self, error: ConnectionLost, *, lost_before_s: float = float("inf")) -> None:
        """End the lost streams, or only those that were lost before a time."""
        waiting, self._lost = self._lost, []
        for inbox in waiting:
            if inbox.lost_s is None or inbox.lost_s < lost_before_s:
                inbox.fail(error)
            else:
                self._lost.append(inbox)

    async def _connect(self) -> Connection:
        num_closes = self._num_closes
        async with self._connecting:  # one task connects, the others wait for it
            for connection in self._connections:
                if connection.has_ended:
                    await connection.close()
            self._connections = [c for c in self._connections if not c.has_ended]
            if num_closes != self._num_closes:
                raise _closed()
            if self._connections and self._connections[-1].takes_streams:
                return self._connections[-1]
            if self._session is None:
                # Our own limits hold; aiohttp's would cut in at 30 s.
                self._session = aiohttp.ClientSession(
                    headers=self._headers,
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
                )
            connection = await Connection.open(
                self._session,
                self._url,
                self._encoding,
                timeout_s=self._timeouts.connect_s,
                on_lost=self._take_lost if self._resume else None,
            )
            if num_closes != self._num_closes:
                await connection.close()
                raise _closed()
            self._resume_ttl_s = _resume_ttl_s(connection.hello)
            self._connections.append(connection)
            return connection


def _closed() -> ConnectionLost:
    return ConnectionLost("the client was closed", code=None, retry_after_s=None)


def _resume_ttl_s(hello: Hello) -> float:
    told = hello.limits.get("resume_ttl_s", DEFAULT_RESUME_TTL_S)
    if isinstance(told, bool) or not isinstance(told, int | float):
        return DEFAULT_RESUME_TTL_S
    return min(told, MAX_RESUME_TTL_S)


def _may_pass(error: HeadraceError) -> bool:
    """Whether the same request may be accepted a little later."""
    match error:
        case Overloaded():
            return error.code not in ("deadline_exceeded", "queue_timeout")
        case Unavailable():
            return error.code != "engine_dead"
        case _:
            return isinstance(error, ConnectFailed | ConnectionLost)


def _stream_url(base_url: str) -> str:
    scheme, separator, rest = base_url.rstrip("/").partition("://")
    websocket_scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(scheme)
    if not separator or websocket_scheme is None or not rest:
        raise ValueError(f"base_url must look like {DEFAULT_URL}, got {base_url!r}")
    return f"{websocket_scheme}://{rest}/v1/stream"
