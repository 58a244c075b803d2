"""Requests that gave their row to another one and kept their blocks.

They wait like any other, and go on with a single token where they stopped. Their blocks are the
first to be taken when somebody else needs blocks: like a cached prefix, they are kept only for as
long as nobody misses them.
"""

from jaxengine.kv_cache_manager import KVCacheManager
from jaxengine.request import Request

__all__ = ["PausedRequests"]


class PausedRequests:
    """The requests that wait with their blocks; what they lose, they compute anew."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._requests: set[Request] = set()

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def add(self, request: Request) -> None:
        self._requests.add(request)

    def discard(self, request: Request) -> None:
        """Let go of a request that runs again or has ended, and leave its blocks alone."""
        self._requests.discard(request)

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
