"""Requests that gave their row to another one and kept their blocks.

They wait like any other, and go on with a single token where they stopped. Their blocks are the
first to be taken when somebody else needs blocks: like a cached prefix, they are kept only for as
long as nobody misses them.
"""

from collections import Counter

from jaxengine.kv_cache_manager import KVCacheManager
from jaxengine.request import Request
from jaxengine.waiting_queue import WaitingQueue

__all__ = ["PausedRequests"]


class PausedRequests:
    """The requests that wait with their blocks; what they lose, they compute anew.

    Args:
        kv: holds the blocks.
        waiting: where they wait.
    """

    def __init__(self, kv: KVCacheManager, waiting: WaitingQueue) -> None:
        self._kv = kv
        self._waiting = waiting
        self._requests: set[Request] = set()

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def add(self, request: Request) -> None:
        self._requests.add(request)

    def discard(self, request: Request) -> None:
        """Let go of a request that runs again or has ended, and leave its blocks alone."""
        self._requests.discard(request)

    def lacking_blocks(self, num_blocks: int, *, for_request: Request) -> int:
        """Return how many blocks would lack of so many, if all others lost theirs."""
        lacking = num_blocks - self._kv.num_free_blocks
        if lacking > 0:
            others = self._requests - {for_request}
            held = Counter(block_id for request in others for block_id in request.block_ids)
            num_holders = self._kv.num_holders
            lacking -= sum(num_holders(block_id) == count for block_id, count in held.items())
        return lacking

    def make_room(self, num_blocks: int, *, for_request: Request) -> None:
        """Take blocks of others, last by rank first, until so many are free or none is left."""
        while self._kv.num_free_blocks < num_blocks:
            others = self._requests - {for_request}
            if not others:
                return
            self._free(max(others, key=lambda request: request.rank))

    def clear(self) -> None:
        """Take the blocks of all."""
        for request in list(self._requests):
            self._free(request)

    def _free(self, request: Request) -> None:
        self._requests.remove(request)
        self._kv.free(request)
        request.num_computed_tokens = 0
        self._waiting.recount(request)
