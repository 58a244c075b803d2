"""The requests that run, each in a row of its own: its place in the device state."""

from collections.abc import Collection, Iterator

from jaxengine.request import Request, RequestStatus

__all__ = ["RunningRequests"]


class RunningRequests(Collection[Request]):
    """The requests that run, in order of admission.

    Args:
        num_rows: most that can run.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._requests: dict[Request, None] = {}
        self._free_rows = list(range(num_rows))

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: object) -> bool:
        return request in self._requests

    @property
    def has_free_row(self) -> bool:
        return bool(self._free_rows)

    def add(self, request: Request) -> None:
        """Let a request run; there must be a free row."""
        request.status = RequestStatus.RUNNING
        request.row = self._free_rows.pop()
        request.account.num_running += 1
        self._requests[request] = None

    def remove(self, request: Request) -> None:
        """Take a request's row. Its status is left to the caller."""
        del self._requests[request]
        request.account.num_running -= 1
        assert request.row is not None, f"{request} runs without a row"
        self._free_rows.append(request.row)
        request.row = None

    def check_integrity(self) -> None:
        """Raise AssertionError unless every row is free or somebody's, and no two share one."""
        rows = [*(request.row for request in self), *self._free_rows]
        assert len(rows) == len(set(rows)) == self._num_rows, "a lost or doubled row"
