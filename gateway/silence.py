"""Tells when nothing has happened for a while."""

import asyncio
from collections.abc import Callable

__all__ = ["SilenceAlarm"]


class SilenceAlarm:
    """Rings after a silence, however often that is put off.

    Putting it off costs no timer: the one that there is looks when it rings. So it may be done for
    every token.

    Args:
        silence_s: how long nothing must happen; None never rings.
        ring: called after it.

    Attributes:
        is_due: whether it has rung since it was last reset.
    """

    def __init__(self, silence_s: float | None, ring: Callable[[], None]) -> None:
        self.is_due = False
        self._silence_s = silence_s
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._reset_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        if silence_s is not None:
            self._timer = self._loop.call_later(silence_s, self._look, silence_s)

    def reset(self) -> None:
        """Something has happened, or was done about the silence."""
        self.is_due = False
        self._reset_s = self._loop.time()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, silence_s: float) -> None:
        left_s = self._reset_s + silence_s - self._loop.time()
        if left_s <= 0:
            self.is_due = True
            self._ring()
            left_s = silence_s
        self._timer = self._loop.call_later(left_s, self._look, silence_s)
