"""What waits to be sent on one websocket of responses, in order.

Putting never blocks; whoever can make more waits for room first, and its answer merges meanwhile.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

__all__ = ["MAX_WAITING", "CloseFrame", "FrameQueue", "PongFrame"]

MAX_WAITING = 64  # frames beyond which nobody should make more


@dataclass(frozen=True, slots=True)
class PongFrame:
    """Answer to a websocket ping frame."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class CloseFrame:
    """The last thing to send."""

    code: int
    reason: str


class FrameQueue:
    """Frames on their way from many tasks to the one that sends."""

    def __init__(self) -> None:
        self._frames: deque[bytes | PongFrame] = deque()
        self._close: CloseFrame | None = None
        self._wakeup = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()

    def put(self, frame: bytes | PongFrame) -> None:
        """Add a frame; after `close` it is dropped."""
        if self._close is None:
            self._frames.append(frame)
            if len(self._frames) >= MAX_WAITING:
                self._has_room.clear()
            self._wakeup.set()

    def close(self, code: int, reason: str) -> None:
        """Send what is there, then close. The first call counts."""
        if self._close is None:
            self._close = CloseFrame(code, reason)
            self._wakeup.set()
            self._has_room.set()

    async def wait_for_room(self) -> None:
        """Return once few enough frames wait, or none is taken any more."""
        await self._has_room.wait()

    async def take(self) -> bytes | PongFrame | CloseFrame:
        """Return the next thing to send. Cancelling is safe: nothing is taken."""
        while not self._frames and self._close is None:
            self._wakeup.clear()
            await self._wakeup.wait()
        if self._frames:
            frame = self._frames.popleft()
            if len(self._frames) < MAX_WAITING // 2:
                self._has_room.set()
            return frame
        assert self._close is not None
        return self._close
