"""Requests whose time may run out."""

import heapq
from collections.abc import Iterator

from jaxengine.outputs import FinishReason
from jaxengine.request import Request

__all__ = ["ExpiryQueue"]

# Entries up to which nobody looks for those that no longer matter.
LEAST_SWEPT = 64


class ExpiryQueue:
    """Deadlines and queue timeouts, soonest first. What no longer matters is dropped on the way."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Request, FinishReason]] = []
        self._num_entries = 0
        self._sweep_at = LEAST_SWEPT

    def add(self, request: Request) -> None:
        if request.queue_timeout_s is not None:
            self._push(request, request.queue_timeout_s, FinishReason.QUEUE_TIMEOUT)
        if request.deadline_s is not None:
            self._push(request, request.deadline_s, FinishReason.DEADLINE)
        if len(self._entries) > self._sweep_at:
            self._sweep()

    def next_s(self) -> float | None:
        """Return the time of the next entry that still matters, or None."""
        entries = self._entries
        while entries and not _matters(entries[0][2], entries[0][3]):
            heapq.heappop(entries)
        return entries[0][0] if entries else None

    def pop_due(self, now_s: float) -> Iterator[tuple[Request, FinishReason]]:
        """Take out the requests whose time is up, one by one, with the reason.

        Whoever gets one must end it before taking the next: both its limits may have passed.
        """
        while (next_s := self.next_s()) is not None and next_s <= now_s:
            _, _, request, reason = heapq.heappop(self._entries)
            yield request, reason

    def _push(self, request: Request, after_s: float, reason: FinishReason) -> None:
        self._num_entries += 1
        heapq.heappush(
            self._entries, (request.arrival_time_s + after_s, self._num_entries, request, reason)
        )

    def _sweep(self) -> None:
        """Let go of ended requests, however far away their deadlines are."""
        self._entries = [entry for entry in self._entries if _matters(entry[2], entry[3])]
        heapq.heapify(self._entries)
        self._sweep_at = max(LEAST_SWEPT, 2 * len(self._entries))


def _matters(request: Request, reason: FinishReason) -> bool:
    has_started = request.first_scheduled_time_s is not None
    return not (request.is_finished or (reason is FinishReason.QUEUE_TIMEOUT and has_started))
