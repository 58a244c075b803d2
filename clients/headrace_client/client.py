"""The client: one object per server, one socket, many streams."""

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self, Unpack, get_args

import aiohttp

from headrace_client.connection import Connection
from headrace_client.messages import ChatMessage, GenerationOptions, Hello
from headrace_client.stream import Stream, Timeouts
from headrace_client.wire import ENCODINGS, EncodingName, request_body

__all__ = ["DEFAULT_URL", "AsyncClient"]

DEFAULT_URL = "http://127.0.0.1:8000"

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
    The methods may be called from any number of tasks of one event loop.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        encoding: EncodingName = "json",
        timeout: Timeouts | float | None = Timeouts(),  # noqa: B008 (frozen)
    ) -> None:
        """Connect to nothing yet.

        Args:
            base_url: scheme, host and port of the server, and a path if it is mounted under one.
            encoding: how messages travel; "msgpack" is smaller, "json" can be read on the wire.
            timeout: time limits; a number limits the whole of each answer, None lifts all limits.

        Raises:
            ValueError: an argument is not one of those.
        """
        if encoding not in get_args(EncodingName):
            raise ValueError(f"encoding must be 'json' or 'msgpack', got {encoding!r}")
        if timeout is None:
            timeout = _NO_LIMITS
        elif not isinstance(timeout, Timeouts):
            timeout = Timeouts(total_s=timeout)
        self._url = _stream_url(base_url)
        self._encoding = ENCODINGS[encoding]
        self._timeouts = timeout
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
        """
        return (await self._connect()).hello

    async def close(self) -> None:
        """Close the socket; streams that are still open end with ConnectionLost. Idempotent."""
        connections, self._connections = self._connections, []
        session, self._session = self._session, None
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
        connection = await self._connect()
        inbox = connection.start(
            request, return_token_ids=bool(options.get("return_token_ids", False))
        )
        stream = Stream(inbox, self._timeouts, connection.cancel)
        try:
            await stream.wait_accepted()
        except BaseException:
            stream.abandon()
            raise
        return stream

    async def _connect(self) -> Connection:
        async with self._connecting:  # one task connects, the others wait for it
            for connection in self._connections:
                if connection.has_ended:
                    await connection.close()
            self._connections = [c for c in self._connections if not c.has_ended]
            if self._connections and self._connections[-1].takes_streams:
                return self._connections[-1]
            if self._session is None:
                # Our own limits hold; aiohttp's would cut in at 30 s.
                self._session = aiohttp.ClientSession(
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=None)
                )
            connection = await Connection.open(
                self._session, self._url, self._encoding, timeout_s=self._timeouts.connect_s
            )
            self._connections.append(connection)
            return connection


def _stream_url(base_url: str) -> str:
    scheme, separator, rest = base_url.rstrip("/").partition("://")
    websocket_scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(scheme)
    if not separator or websocket_scheme is None or not rest:
        raise ValueError(f"base_url must look like {DEFAULT_URL}, got {base_url!r}")
    return f"{websocket_scheme}://{rest}/v1/stream"
