"""One answer while it is being generated."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from headrace_client.errors import GenerationTimeout
from headrace_client.events import Finished, Resumed, Started, StreamEvent
from headrace_client.inbox import StreamInbox, TextDelta
from headrace_client.messages import Timing, Usage

__all__ = ["Stream", "Timeouts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Time limits in seconds; None means no limit.

    Attributes:
        connect_s: until the server has said hello.
        first_token_s: from the start of a request until its first text.
        idle_s: between texts.
        total_s: from the start of a request until its end.
    """

    connect_s: float | None = 10.0
    first_token_s: float | None = 300.0
    idle_s: float | None = 60.0
    total_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("connect_s", "first_token_s", "idle_s", "total_s"):
            value: float | None = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive or None, got {value}")


class Stream:
    """An answer: ``async with await client.chat("Hi") as stream: async for delta in stream``.

    Leaving the block before the end cancels the generation in the server. While nobody reads,
    deltas merge into one, so reading slowly costs memory only for the answer itself.
    """

    def __init__(
        self, inbox: StreamInbox, timeouts: Timeouts, send_cancel: Callable[[str], None]
    ) -> None:
        self._inbox = inbox
        self._timeouts = timeouts
        self._send_cancel = send_cancel
        self._started_s = inbox.last_arrival_s
        self._cancelled = False

    # ---- what is known about the answer ----

    @property
    def id(self) -> str:
        """The name of the stream on its connection."""
        return self._inbox.stream_id

    @property
    def request_id(self) -> str | None:
        """The server's name for the request, as in its logs."""
        return self._inbox.accepted.request_id if self._inbox.accepted else None

    @property
    def finish_reason(self) -> str | None:
        """Why it ended: "stop", "length", "deadline" or "cancelled"; None before the end."""
        return self._inbox.done.finish_reason if self._inbox.done else None

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token id that ended the answer, if one did."""
        return self._inbox.done.stop_reason if self._inbox.done else None

    @property
    def usage(self) -> Usage | None:
        """Tokens counted by the server; None before the end."""
        return self._inbox.done.usage if self._inbox.done else None

    @property
    def timing(self) -> Timing | None:
        """Times measured by the server; None before the end."""
        return self._inbox.done.timing if self._inbox.done else None

    # ---- reading ----

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        """Return all text that has arrived since the last call.

        Cancelling is safe: nothing is lost, the next call returns it.

        Raises:
            GenerationTimeout: a time limit passed; the generation is cancelled.
            GenerationFailed: the server gave up.
            ConnectionLost: the connection ended.
            ProtocolError: the server broke the protocol.
        """
        limit: Literal["first_token", "idle"] = "idle" if self._inbox.has_output else "first_token"
        delta = await self._within(self._inbox.take, limit)
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def text(self) -> str:
        """Read to the end and return the text that was not read before.

        Cancelling loses the part that was read by this call. Raises as iterating does.
        """
        return "".join([delta.text async for delta in self])

    async def events(self) -> AsyncIterator[StreamEvent]:
        """Yield what happens: Started, then TextDelta and Resumed, and Finished as the last.

        Text that was read before is not told again. Raises as iterating over the stream does.
        """
        if (accepted := self._inbox.accepted) is not None:
            yield Started(request_id=accepted.request_id, prompt_tokens=accepted.prompt_tokens)
        num_resumes = 0
        async for delta in self:
            if self._inbox.num_resumes > num_resumes:
                num_resumes = self._inbox.num_resumes
                yield Resumed(num_resumes=num_resumes)
            yield delta
        if (done := self._inbox.done) is not None:
            yield Finished(
                finish_reason=done.finish_reason,
                stop_reason=done.stop_reason,
                usage=done.usage,
                timing=done.timing,
            )

    # ---- ending ----

    def cancel(self) -> None:
        """Ask the server to end the generation; idempotent and never blocks.

        Iterating then yields what is left, and ends with finish reason "cancelled".
        """
        if not self._cancelled and not self._inbox.has_ended:
            self._cancelled = True
            self._send_cancel(self.id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Cancel, and throw away whatever still comes. Leaving the block does it."""
        self.cancel()
        self._inbox.discard()

    async def wait_accepted(self) -> None:
        """Return when the server has accepted the request. Cancelling is safe.

        Raises:
            RequestRejected, GenerationTimeout, ConnectionLost, ProtocolError.
        """
        await self._within(self._inbox.wait_accepted, "first_token")

    async def _within[T](
        self, wait: Callable[[], Coroutine[Any, Any, T]], limit: Literal["first_token", "idle"]
    ) -> T:
        """Await `wait()` until the first of the time limits that apply."""
        limits = self._timeouts
        ends: list[tuple[float, float | None, Literal["first_token", "idle", "total"]]]
        if limit == "first_token":
            ends = [(self._started_s, limits.first_token_s, limit)]
        else:
            ends = [(self._inbox.last_arrival_s, limits.idle_s, limit)]
        ends.append((self._started_s, limits.total_s, "total"))
        end_s, after_s, first = min(
            ((since + length, length, name) for since, length, name in ends if length is not None),
            default=(None, 0.0, limit),
        )
        try:
            async with asyncio.timeout_at(end_s):
                return await wait()
        except TimeoutError:
            self.cancel()
            error = GenerationTimeout(first, after_s)
            self._inbox.fail(error)
            self._inbox.discard()
            raise error from None
