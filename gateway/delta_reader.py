"""Reads answers without waking a task for each of their tokens.

A step of the engine brings a token to every stream. To wake a task for each would cost as much as
what is then done with it. So nobody waits: the event loop is asked to call who takes the tokens,
once after all that has come by then, so that tokens merge when the loop falls behind the engine.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import closing

from gateway.generation import TextDelta, TextStream
from gateway.silence import SilenceAlarm
from jaxengine.wakeup import Wakeup

__all__ = ["DeltaReader", "deltas_and_silences"]


class DeltaReader:
    """Hands on the deltas of several streams, each as it comes.

    While nobody is in `read`, deltas merge in their streams.

    Args:
        streams: nobody else reads them.
        take_in: called with (index of the stream, delta), and never waits. Returns whether it can
            take more now. What it raises, `read` raises.
    """

    def __init__(
        self, streams: Sequence[TextStream], take_in: Callable[[int, TextDelta], bool]
    ) -> None:
        self._take_in = take_in
        self._running = dict(enumerate(streams))
        self._loop = asyncio.get_running_loop()
        self._wakeup = Wakeup()
        self._is_reading = False
        self._is_planned = False  # to take what has come
        self._failure: Exception | None = None
        for stream in streams:
            stream.notify(self._plan)

    @property
    def has_ended(self) -> bool:
        """Whether every stream has given its last delta."""
        return not self._running

    async def read(self) -> None:
        """Return when all have ended, `take_in` cannot take more, or somebody interrupts.

        Cancelling is safe: no text is lost.
        """
        self._is_reading = not self.has_ended
        self._take_all()
        try:
            while self._is_reading:
                await self._wakeup.wait()
        finally:
            self._is_reading = False
        if self._failure is not None:
            raise self._failure

    def interrupt(self) -> None:
        """Let `read` return."""
        self._is_reading = False
        self._wakeup.set()

    def _plan(self) -> None:
        if not self._is_planned:
            self._is_planned = True
            self._loop.call_soon(self._take_all)

    def _take_all(self) -> None:
        self._is_planned = False
        try:
            for index, stream in tuple(self._running.items()):
                if self._is_reading and (delta := stream.take()) is not None:
                    can_take_more = self._take_in(index, delta)
                    if delta.finish is not None:
                        del self._running[index]
                    if not (can_take_more and self._running):
                        self.interrupt()
        except Exception as failure:  # of `read`, wherever it came up
            self._failure = failure
            self.interrupt()


async def deltas_and_silences(
    stream: TextStream, silence_s: float | None
) -> AsyncGenerator[TextDelta | None]:
    """Yield all deltas of a stream, and None whenever nothing came for so long.

    While the caller is busy, deltas merge.
    """
    wakeup = Wakeup()
    stream.notify(wakeup.set)
    with closing(SilenceAlarm(silence_s, wakeup.set)) as alarm:
        while True:
            if (delta := stream.take()) is not None:
                alarm.reset()
                yield delta
                if delta.finish is not None:
                    return
            elif alarm.is_due:
                alarm.reset()
                yield None
            else:
                await wakeup.wait()
