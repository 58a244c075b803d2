"""Which blocks each request holds: prefix matching, growth, release."""

import hashlib
from array import array
from collections.abc import Collection

from jaxengine.block_pool import BlockHash, BlockPool
from jaxengine.request import Request

__all__ = ["KVCacheManager"]


class KVCacheManager:
    """Policy over the block pool; owns the block tables, `Request.block_ids`.

    Tokens of a request and their blocks:

        | cached (match_prefix) | computed | scheduled now | reserved |
        |<-------------------- blocks in the table ------------------>|

    A block enters the prefix cache once all its tokens are known and scheduled. Steps run on the
    device in order, so whoever hits the block later reads what this request wrote.

    Args:
        max_pending_tokens: most tokens of a request that are computed and not known on the host,
            when a step is scheduled.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        max_pending_tokens: int = 1,
    ) -> None:
        self.max_pending_tokens = max_pending_tokens
        self._pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._holders: set[Request] = set()
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can use."""
        return self._pool.num_usable

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks that hold a cached prefix."""
        return self._pool.num_free_cached

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        return -(-num_tokens // self._block_size)

    def blocks_needed(self, request: Request, num_tokens: int) -> int:
        """Return how many more blocks the request needs to hold `num_tokens` tokens."""
        return max(0, self.blocks_for(num_tokens) - len(request.block_ids))

    def num_holders(self, block_id: int) -> int:
        """Return how many requests hold a block."""
        return self._pool.ref_count(block_id)

    def match_prefix(self, request: Request, unfinished: Collection[int] = ()) -> int:
        """Give a request without blocks the cached blocks of its beginning.

        The last token is never matched: its logits are needed, so it must be computed. So are
        those of all tokens whose log-probabilities are wanted.

        Args:
            request: the request.
            unfinished: blocks that may not have been written when the request reads them.

        Returns:
            The number of tokens in those blocks.
        """
        table = request.block_ids
        assert not table, f"{request} holds blocks already"
        self._holders.add(request)
        if not self._enable_prefix_caching or request.lacks_prompt_logprobs:
            return 0
        most = (len(request.token_ids) - 1) // self._block_size
        for index in range(most):
            block_hash, tokens = self._hash(request, index), self._block_tokens(request, index)
            block_id = self._pool.acquire_cached(block_hash, tokens, unfinished)
            if block_id is None:
                break
            table.append(block_id)
        return len(table) * self._block_size

    def count_prefix_lookup(self, num_queried: int, num_hit: int) -> None:
        """Count one admission in the statistics of the prefix cache, in tokens."""
        self.prefix_queries += num_queried
        self.prefix_hits += num_hit

    def reserve(self, request: Request, num_tokens: int, unfinished: Collection[int] = ()) -> bool:
        """Make sure that the blocks of a request hold its first `num_tokens` tokens.

        Args:
            request: the request.
            num_tokens: as many.
            unfinished: blocks that it must not get, for which there must be as many others free.

        Returns:
            False if too few blocks are free; then nothing has changed.
        """
        needed = self.blocks_needed(request, num_tokens)
        if needed > self._pool.num_free:
            return False
        if needed:
            self._holders.add(request)
            request.block_ids += self._pool.allocate(needed, unfinished)
        request.num_slots = len(request.block_ids) * self._block_size
        return True

    def remember(self, request: Request, end: int) -> None:
        """Put blocks into the prefix cache that are full once tokens up to `end` are computed.

        Call it before the computed tokens are counted. Only tokens known on the host count.
        """
        if self._enable_prefix_caching:
            # The last computed tokens may have been pending when their block was scheduled.
            computed = request.num_computed_tokens
            first = max(0, computed - self.max_pending_tokens) // self._block_size
            last = min(end, len(request.token_ids)) // self._block_size
            if first < last:
                table = request.block_ids
                for index in range(first, last):
                    tokens = self._block_tokens(request, index)
                    self._pool.remember(table[index], self._hash(request, index), tokens)

    def free(self, request: Request) -> None:
        """Take all blocks back. Tails become free first, so beginnings stay cached longest."""
        request.num_slots = 0
        self._pool.release(reversed(request.block_ids))
        request.block_ids = []  # a step that was scheduled may still hold the old list
        self._holders.discard(request)

    def reset_prefix_cache(self) -> None:
        """Forget all cached contents, because what the device holds is no longer known."""
        self._pool.forget_all()

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is accounted for exactly once."""
        self._pool.check_integrity(request.block_ids for request in self._holders)

    def _block_tokens(self, request: Request, index: int) -> tuple[int, ...]:
        start = index * self._block_size
        return tuple(request.token_ids[start : start + self._block_size])

    def _hash(self, request: Request, index: int) -> BlockHash:
        """Return the hash of a full block: SHA-256 over the parent's hash and the tokens.

        The first parent names the tenant and its salt, so that no tenant can find out by the
        time of an answer what another one has asked.
        """
        hashes = request.block_hashes
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else _salt_hash(request.tenant, request.cache_salt)
            tokens = array("q", self._block_tokens(request, len(hashes)))
            hashes.append(hashlib.sha256(parent + tokens.tobytes()).digest())
        return hashes[index]


def _salt_hash(tenant: str, salt: str | None) -> BlockHash:
    # The tenant's hash has a fixed length, so that no tenant and salt look like another two;
    # a different first byte keeps "no salt" apart from the empty salt.
    text = b"\x00" if salt is None else b"\x01" + salt.encode("utf-8", "surrogatepass")
    owner = hashlib.sha256(tenant.encode("utf-8", "surrogatepass")).digest()
    return hashlib.sha256(owner + text).digest()
