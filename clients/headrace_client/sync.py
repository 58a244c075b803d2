"""The client for programs that do not use asyncio: the same, with plain calls and iterators."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from headrace_client.client import DEFAULT_URL, AsyncClient
from headrace_client.events import StreamEvent
from headrace_client.inbox import TextDelta
from headrace_client.messages import ChatMessage, GenerationOptions, Hello, Timing, Usage
from headrace_client.stream import Stream, Timeouts
from headrace_client.wire import EncodingName

__all__ = ["Client", "SyncStream"]


CLOSE_TIMEOUT_S = 1.0


class Client:
    """A headrace server, as seen from a program without an event loop.

    ```
    with Client("http://127.0.0.1:8000") as client:
        for delta in client.chat("What is the capital of France?", temperature=0):
            print(delta.text, end="", flush=True)
    ```

    It runs an `AsyncClient` in a thread of its own, so the socket is served while the program does
    something else. May be used from several threads.
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
        """Connect to nothing yet; arguments and errors as for `AsyncClient`."""
        self._client = AsyncClient(
            base_url,
            api_key=api_key,
            encoding=encoding,
            timeout=timeout,
            max_retries=max_retries,
            resume=resume,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="headrace-client", daemon=True
        )
        self._thread.start()
        self._is_closed = False

    def chat(
        self, messages: str | Sequence[ChatMessage], **options: Unpack[GenerationOptions]
    ) -> "SyncStream":
        """Start an answer, as `AsyncClient.chat`."""
        return SyncStream(self, self._run(self._client.chat(messages, **options)))

    def complete(
        self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]
    ) -> "SyncStream":
        """Start a continuation, as `AsyncClient.complete`."""
        return SyncStream(self, self._run(self._client.complete(prompt, **options)))

    def hello(self) -> Hello:
        """Return what the server says about itself, as `AsyncClient.hello`."""
        return self._run(self._client.hello())

    def close(self) -> None:
        """Close the socket and end the thread. Idempotent."""
        if self._is_closed:
            return
        try:
            self._run(self._shut_down())
        finally:
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def _shut_down(self) -> None:
        await self._client.close()
        await self._loop.shutdown_asyncgens()
        # Calls of other threads end by the error that closing gives them.
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            _, stuck = await asyncio.wait(others, timeout=CLOSE_TIMEOUT_S)
            for task in stuck:
                task.cancel()

    def _run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it in the thread and return what it returns; Ctrl-C cancels it."""
        if self._is_closed:
            coroutine.close()
            raise RuntimeError("the client is closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _call(self, function: Callable[[], None]) -> None:
        """Call it in the thread, soon."""
        if not self._is_closed:
            self._loop.call_soon_threadsafe(function)


class SyncStream:
    """An answer, as `Stream`: ``for delta in client.chat("Hi")``.

    As a context manager it cancels the generation when the block is left before the end.
    """

    def __init__(self, client: Client, stream: Stream) -> None:
        self._client = client
        self._stream = stream

    @property
    def request_id(self) -> str | None:
        """The server's name for the request, as in its logs."""
        return self._stream.request_id

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, as `Stream.finish_reason`; None before the end."""
        return self._stream.finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token id that ended the answer, if one did."""
        return self._stream.stop_reason

    @property
    def usage(self) -> Usage | None:
        """Tokens counted by the server; None before the end."""
        return self._stream.usage

    @property
    def timing(self) -> Timing | None:
        """Times measured by the server; None before the end."""
        return self._stream.timing

    def __iter__(self) -> Iterator[TextDelta]:
        return self

    def __next__(self) -> TextDelta:
        """Return all text that has arrived since the last call; raises as `Stream.__anext__`."""
        delta = self._client._run(_next(self._stream))
        if delta is None:
            raise StopIteration
        return delta

    def text(self) -> str:
        """Read to the end and return the text that was not read before."""
        return self._client._run(self._stream.text())

    def events(self) -> Iterator[StreamEvent]:
        """Yield what happens, as `Stream.events`."""
        events = self._stream.events()
        while (event := self._client._run(_next(events))) is not None:
            yield event

    def cancel(self) -> None:
        """Ask the server to end the generation; what is left can be read."""
        self._client._call(self._stream.cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._client._call(self._stream.abandon)


async def _next[T](source: AsyncIterator[T]) -> T | None:
    """Return the next item, or None at the end: StopIteration cannot pass through a future."""
    with contextlib.suppress(StopAsyncIteration):
        return await anext(source)
    return None
