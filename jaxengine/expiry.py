"""Requests whose time may run out."""

import heapq

from jaxengine.outputs import FinishReason
from jaxengine.request import Request

__all__ = ["ExpiryQueue"]


class ExpiryQueue:
    """Deadlines and queue timeouts, soonest first. What no longer matters is dropped on the way."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Request, FinishReason]] = []
        self._num_entries = 0

    def add(self, request: Request) -> None:
        if request.queue_timeout_s is not None:
            self._push(request, request.queue_timeout_s, FinishReason.QUEUE_TIMEOUT)
        if request.deadline_s is not None:
            self._push(request, request.deadline_s, FinishReason.DEADLINE)

    def next_s(self) -> float | None:
        """Return the time of the next entry that still matters, or None."""
        entries = self._entries
        while entries and not _matters(entries[0][2], entries[0][3]):
            heapq.heappop(entries)
        return entries[0][0] if entries else None

    def pop_due(self, now_s: float) -> list[tuple[Request, FinishReason]]:
        """Take out the requests whose time is up, with the reason."""
        due = []
        while (next_s := self.next_s()) is not None and next_s <= now_s:
            _, _, request, reason = heapq.heappop(self._entries)
            due.append((request, reason))
        return due

    def _push(self, request: Request, after_s: float, reason: FinishReason) -> None:
        self._num_entries += 1
        heapq.heappush(
            self._entries, (request.arrival_time_s + after_s, self._num_entries, request, reason)
        )


def _matters(request: Request, reason: FinishReason) -> bool:
    has_started = request.first_scheduled_time_s is not None
    return not (request.is_finished or (reason is FinishReason.QUEUE_TIMEOUT and has_started))
