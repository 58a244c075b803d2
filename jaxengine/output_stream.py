"""The asyncio end of one request: a one-slot mailbox whose content merges."""

from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

from jaxengine.outputs import RequestOutput
from jaxengine.wakeup import Wakeup

__all__ = ["OutputStream"]


class OutputStream:
    """Outputs of one request, in order, each token exactly once.

    Use it as ``async with engine.submit(...) as stream: async for output in stream: ...``.
    Leaving the block before the last output aborts the request; the engine frees its blocks
    within a step. While nobody reads, outputs merge into one, so a slow reader costs memory
    only for its own tokens and delays nobody.

    Who does not want a task to be woken for each output sets `on_news`, and calls `take`.

    Owns: the mailbox.
    Never: touches the engine's state (it calls `abort`, which only posts a message).

    Attributes:
        on_news: called whenever there is something to take, or never will be; by default it wakes
            who iterates.
        has_ended: whether nothing more will come.
    """

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._pending: RequestOutput | None = None
        self._wakeup = Wakeup()
        self.on_news: Callable[[], None] = self._wakeup.set
        self.has_ended = False

    def put(self, output: RequestOutput) -> None:
        """Add an output. Called on the event loop only; ignored after the last one."""
        if self.has_ended:
            return
        self._pending = output if self._pending is None else self._pending.merged(output)
        self.has_ended = output.finish_reason is not None
        self.on_news()

    def close(self) -> None:
        """Abort the request unless it has ended. Idempotent and never blocks.

        What has arrived before can still be read; then the iteration ends.
        """
        if not self.has_ended:
            self.has_ended = True
            self.on_news()
            self._abort(self.request_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    def take(self) -> RequestOutput | None:
        """Return all that is new; None if nothing is."""
        output, self._pending = self._pending, None
        return output

    async def __anext__(self) -> RequestOutput:
        """Return all that is new. Cancelling is safe: no token is lost."""
        while (output := self.take()) is None:
            if self.has_ended:
                raise StopAsyncIteration
            await self._wakeup.wait()
        return output
