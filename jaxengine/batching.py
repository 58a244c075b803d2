"""Static and dynamic batching, the baselines that continuous batching is measured against.

A batch is formed from waiting requests and starts together. Its prompts are padded to the longest
and computed before the first token is decoded; then all its rows are computed until its last
request ends, those of ended requests too. Nobody joins meanwhile. The slots that hold padding and
ended rows are scheduled, so the device spends their time, and counted.
"""

from collections.abc import Iterable, Sequence

from jaxengine.config import EngineConfig
from jaxengine.request import Request

__all__ = ["ClosedBatch"]

# A static batch waits until it is full. Once nobody new has come for so long, what is there
# starts, so that the last requests of a run are served as well.
STATIC_PATIENCE_S = 5.0


class ClosedBatch:
    """The batch that runs, and when the next one starts."""

    def __init__(self, config: EngineConfig) -> None:
        self._size = config.max_num_seqs
        self._is_static = config.batching == "static"
        self._window_s = config.batch_window_s
        self._last_arrival_s = 0.0
        self._num_rows = 0
        self._padding = 0  # prompt padding that is still to be computed

    @property
    def has_padding(self) -> bool:
        """Whether padding of prompts is still to be computed."""
        return self._padding > 0

    def note_arrival(self, arrival_time_s: float) -> None:
        """Take note of a request that begins to wait."""
        self._last_arrival_s = arrival_time_s

    def opens_at_s(self, waiting: Iterable[Request]) -> float:
        """Return when requests that wait, one at least, may start, given that nothing runs.

        As soon as they fill a batch they need not wait for others.
        """
        arrivals_s = [request.arrival_time_s for request in waiting]
        if len(arrivals_s) >= self._size:
            return 0.0
        if self._is_static:
            return self._last_arrival_s + STATIC_PATIENCE_S
        return min(arrivals_s) + self._window_s

    def begin(self, members: Sequence[Request]) -> None:
        """Start a batch of these requests."""
        self._num_rows = len(members)
        lengths = [request.num_tokens - request.num_computed_tokens for request in members]
        self._padding = sum(max(lengths) - length for length in lengths)

    def take_padding(self, most: int) -> int:
        """Take so many slots of prompt padding into a step."""
        taken = min(self._padding, most)
        self._padding -= taken
        return taken

    def ended_rows(self, num_live: int) -> int:
        """Return how many rows of the batch a decode step computes for nothing."""
        return self._num_rows - num_live
