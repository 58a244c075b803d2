"""The blocks of the KV cache: which are free, who holds them, what they remember."""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice

__all__ = ["Block", "BlockHash", "BlockPool"]

BlockHash = bytes


@dataclass(slots=True, eq=False)
class Block:
    """One block.

    Attributes:
        ref_count: requests whose table holds it; 0 means free.
        block_hash: names its content while it is in the prefix cache. A block that has one is
            full and is never written again.
        token_ids: the tokens of that content, to verify a hit.
    """

    block_id: int
    ref_count: int = 0
    block_hash: BlockHash | None = None
    token_ids: tuple[int, ...] = ()


class BlockPool:
    """Mechanism, no policy: a free list in eviction order, reference counts, a hash map.

    Every block but the reserved block 0 is exactly one of

    * free, empty,
    * free, cached: nobody holds it, its content can be hit until it is handed out again,
    * referenced by `ref_count` tables.

    Block 0 takes the writes of padding tokens and is never handed out.
    """

    def __init__(self, num_blocks: int) -> None:
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        # In eviction order: empty blocks, then cached ones, the least recently freed first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._by_hash: dict[BlockHash, Block] = {}
        self._num_free_cached = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_free_cached(self) -> int:
        """Free blocks whose content can still be hit."""
        return self._num_free_cached

    @property
    def num_usable(self) -> int:
        """All blocks but the reserved one."""
        return len(self._blocks) - 1

    def ref_count(self, block_id: int) -> int:
        """Return how many requests hold a block."""
        return self._blocks[block_id].ref_count

    def allocate(self, count: int, unfinished: Collection[int] = ()) -> list[int]:
        """Hand out `count` empty blocks, evicting cached contents in order of age.

        Args:
            count: of blocks.
            unfinished: blocks that stay, because steps in flight use them.

        Raises:
            ValueError: fewer are free; check `num_free` first.
        """
        usable = (block_id for block_id in self._free if block_id not in unfinished)
        chosen = list(islice(usable, count))
        if count > len(chosen):
            raise ValueError(f"{count} blocks asked for, {len(chosen)} are free")
        block_ids = []
        for block_id in chosen:
            del self._free[block_id]
            block = self._blocks[block_id]
            self._forget(block)
            block.ref_count = 1
            block_ids.append(block_id)
        return block_ids

    def acquire_cached(
        self, block_hash: BlockHash, token_ids: tuple[int, ...], unfinished: Collection[int] = ()
    ) -> int | None:
        """Take a reference to the block with this content, or return None.

        Args:
            block_hash: names the content.
            token_ids: the content.
            unfinished: blocks that do not have it yet.
        """
        block = self._by_hash.get(block_hash)
        if block is None or block.token_ids != token_ids or block.block_id in unfinished:
            return None
        if block.ref_count == 0:
            del self._free[block.block_id]
            self._num_free_cached -= 1
        block.ref_count += 1
        return block.block_id

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference each. Cached blocks that become free are evicted in this order."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count < 1:
                raise ValueError(f"block {block_id} is not referenced")
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block_id] = None
                if block.block_hash is None:
                    # An empty block is worth nothing: use it before any cached one.
                    self._free.move_to_end(block_id, last=False)
                else:
                    self._num_free_cached += 1

    def remember(self, block_id: int, block_hash: BlockHash, token_ids: tuple[int, ...]) -> None:
        """Put a full block into the prefix cache.

        If the same content is cached already, that block stays the one to hit and this one stays
        private: tables are append-only, so the two are not merged.
        """
        if block_hash in self._by_hash:
            return
        block = self._blocks[block_id]
        block.block_hash, block.token_ids = block_hash, token_ids
        self._by_hash[block_hash] = block

    def forget_all(self) -> None:
        """Drop every cached content; references stay."""
        for block in list(self._by_hash.values()):
            self._forget(block)

    def _forget(self, block: Block) -> None:
        if block.block_hash is not None:
            del self._by_hash[block.block_hash]
            block.block_hash, block.token_ids = None, ()
            self._num_free_cached -= block.ref_count == 0

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Compare all counts with the tables that requests hold.

        Raises:
            AssertionError: a block is lost, held twice, or counted wrongly.
        """
        held: dict[int, int] = {}
        for table in tables:
            for block_id in table:
                held[block_id] = held.get(block_id, 0) + 1
        assert 0 not in {*held, *self._free}, "block 0 was handed out"
        for block in self._blocks[1:]:
            count = held.get(block.block_id, 0)
            assert block.ref_count == count, f"{block} is in {count} tables"
            assert (block.block_id in self._free) == (count == 0), f"{block} is lost or free twice"
        for block_hash, block in self._by_hash.items():
            assert block.block_hash == block_hash, f"{block} is cached under another hash"
        free_cached = sum(block.ref_count == 0 for block in self._by_hash.values())
        assert self._num_free_cached == free_cached, "free cached blocks are counted wrongly"
