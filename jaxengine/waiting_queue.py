"""The requests that wait, in the order in which they should start.

Two orders, one inside the other: tenants by the service they have had (with equal service, the one
that runs less goes first), and the requests of a tenant by rank. A rank never changes while a
request waits, so no step has to look at all of them: the cost of a step does not depend on how many
wait.
"""

import heapq
from collections.abc import Iterator

from jaxengine.request import Request
from jaxengine.tenants import Tenant

__all__ = ["WaitingQueue"]

# Entries of a heap that may no longer matter before it is rebuilt without them.
MAX_STALE = 64


class _Line:
    """The requests of one tenant, a heap by rank. Ended ones are dropped when they surface."""

    __slots__ = ("num_stale", "requests", "tenant")

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.requests: list[tuple[tuple[float, int], Request]] = []
        self.num_stale = 0

    def head(self) -> Request | None:
        while self.requests and self.requests[0][1].is_finished:
            heapq.heappop(self.requests)
            self.num_stale -= 1
        return self.requests[0][1] if self.requests else None

    def drop_stale(self) -> None:
        self.requests = [entry for entry in self.requests if not entry[1].is_finished]
        heapq.heapify(self.requests)
        self.num_stale = 0


class WaitingQueue:
    """A priority queue over tenants and ranks.

    All operations take time logarithmic in the number of requests and tenants that wait.

    Attributes:
        num_tokens: tokens that they have to compute, over all, as far as they were counted.
    """

    def __init__(self) -> None:
        self._lines: dict[Tenant, _Line] = {}
        # (service and running requests when entered, tie breaker, line); service only grows, so an
        # entry that is too low surfaces early and is put right then.
        self._by_service: list[tuple[float, int, int, _Line]] = []
        self._num_entries = 0
        self._num_dead = 0  # entries whose line is gone
        self._num_requests = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, in no particular order."""
        for line in self._lines.values():
            for _, request in line.requests:
                if not request.is_finished:
                    yield request

    def push(self, request: Request) -> None:
        line = self._lines.get(request.account)
        if line is None:
            line = self._lines[request.account] = _Line(request.account)
            self._enter(line)
        heapq.heappush(line.requests, (request.rank, request))
        self._num_requests += 1
        request.num_waiting_tokens = 0
        self.recount(request)

    def recount(self, request: Request) -> None:
        """Count what a request has to compute that begins to wait, or has lost blocks since."""
        self.num_tokens -= request.num_waiting_tokens
        request.num_waiting_tokens = request.num_tokens - request.num_computed_tokens
        self.num_tokens += request.num_waiting_tokens

    def head(self) -> Request | None:
        """Return the request that should start next, or None if none waits."""
        while self._by_service:
            service, _, _, line = self._by_service[0]
            request = line.head()
            if request is None:
                heapq.heappop(self._by_service)
                self._num_dead -= 1
            elif service < line.tenant.service:
                heapq.heappop(self._by_service)
                self._enter(line)
            else:
                return request
        return None

    def pop(self, request: Request) -> None:
        """Take out the head."""
        line = self._lines[request.account]
        assert line.head() is request, f"{request} is not the head of its line"
        heapq.heappop(line.requests)
        self._num_requests -= 1
        self.num_tokens -= request.num_waiting_tokens
        self._close_if_empty(line)

    def forget(self, request: Request) -> None:
        """Count out a request that waited and has just ended."""
        line = self._lines[request.account]
        line.num_stale += 1
        self._num_requests -= 1
        self.num_tokens -= request.num_waiting_tokens
        if line.num_stale > max(MAX_STALE, len(line.requests) // 2):
            line.drop_stale()
        self._close_if_empty(line)

    def _enter(self, line: _Line) -> None:
        self._num_entries += 1
        tenant = line.tenant
        entry = (tenant.service, tenant.num_running, self._num_entries, line)
        heapq.heappush(self._by_service, entry)

    def _close_if_empty(self, line: _Line) -> None:
        """Let go of a line without requests. Its entry stays until it surfaces, or many have."""
        if len(line.requests) > line.num_stale:
            return
        del self._lines[line.tenant]
        line.requests.clear()
        self._num_dead += 1
        if self._num_dead > max(MAX_STALE, len(self._by_service) // 2):
            self._by_service = [entry for entry in self._by_service if entry[-1].requests]
            heapq.heapify(self._by_service)
            self._num_dead = 0
