"""Lets one task wait until there is something to do."""

import asyncio

__all__ = ["Wakeup"]


class Wakeup:
    """A flag that one task waits for; waiting clears it. Use it on the event loop only.

    An `asyncio.Event` serves many who wait, at several times the cost, and this is set for every
    token.
    """

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake the task that waits, or let the next one that would wait go on."""
        self._is_set = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Return once it is set. Cancelling is safe: what is set stays set."""
        if not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_set = False
