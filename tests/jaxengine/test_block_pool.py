import pytest

from jaxengine.block_pool import BlockPool

A, B, C = b"hash a", b"hash b", b"hash c"


def cached_pool(num_blocks: int, hashes: list[bytes]) -> BlockPool:
    """A pool in which blocks 1, 2, … hold these contents and are free; the first went first."""
    pool = BlockPool(num_blocks)
    block_ids = pool.allocate(len(hashes))
    for block_id, block_hash in zip(block_ids, hashes, strict=True):
        pool.remember(block_id, block_hash, (block_id,))
    pool.release(block_ids)
    return pool


def test_a_fresh_pool_hands_out_its_blocks_in_order_and_never_block_0():
    pool = BlockPool(5)
    assert (pool.num_usable, pool.num_free, pool.num_free_cached) == (4, 4, 0)
    assert pool.allocate(2) == [1, 2]
    assert pool.allocate(2) == [3, 4]
    assert pool.num_free == 0


def test_asking_for_nothing_gives_nothing():
    pool = BlockPool(2)
    pool.allocate(1)
    assert pool.allocate(0) == []


def test_asking_for_more_than_is_free_is_an_error_and_changes_nothing():
    pool = BlockPool(5)
    held = pool.allocate(2)
    with pytest.raises(ValueError, match="3 blocks asked for, 2 are free"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check_integrity([held])


def test_empty_blocks_are_used_before_cached_ones():
    pool = cached_pool(5, [A, B])  # 1 and 2 are cached, 3 and 4 empty
    pool.release(pool.allocate(2))
    assert sorted(pool.allocate(2)) == [3, 4]
    assert pool.num_free_cached == 2


def test_an_empty_block_that_comes_back_later_is_still_used_before_cached_ones():
    pool = BlockPool(4)
    first, second, third = pool.allocate(3)
    pool.remember(second, A, (1,))
    pool.release([second])
    pool.release([third])
    assert pool.allocate(1) == [third]
    pool.check_integrity([[first], [third]])


def test_cached_blocks_are_evicted_in_the_order_in_which_they_were_released():
    pool = BlockPool(4)
    pool.allocate(3)
    for block_id, block_hash in ((1, A), (2, B), (3, C)):
        pool.remember(block_id, block_hash, (block_id,))
    pool.release([3, 2])  # a table from its tail
    pool.release([1])
    assert pool.allocate(1) == [3]
    assert pool.acquire_cached(C, (3,)) is None
    assert pool.acquire_cached(B, (2,)) == 2  # in use again: no longer next
    assert pool.allocate(1) == [1]
    assert pool.num_free == 0


def test_a_hit_makes_a_block_the_last_to_be_evicted():
    pool = cached_pool(4, [A, B, C])
    pool.release([pool.acquire_cached(A, (1,))])
    assert pool.allocate(3) == [2, 3, 1]


def test_a_cached_block_can_be_held_by_many_and_is_free_after_the_last():
    pool = cached_pool(3, [A])
    assert pool.acquire_cached(A, (1,)) == 1
    assert pool.acquire_cached(A, (1,)) == 1
    assert (pool.num_free, pool.num_free_cached) == (1, 0)
    pool.check_integrity([[1], [1]])
    pool.release([1])
    assert pool.num_free == 1
    pool.release([1])
    assert (pool.num_free, pool.num_free_cached) == (2, 1)
    assert pool.acquire_cached(A, (1,)) == 1


def test_a_block_in_use_can_be_hit():
    pool = BlockPool(3)
    [block_id] = pool.allocate(1)
    pool.remember(block_id, A, (5, 6))
    assert pool.acquire_cached(A, (5, 6)) == block_id
    pool.check_integrity([[block_id], [block_id]])


def test_a_hit_is_verified_by_the_tokens_themselves():
    pool = cached_pool(3, [A])
    assert pool.acquire_cached(A, (2,)) is None
    assert pool.acquire_cached(B, (1,)) is None
    pool.check_integrity([])


def test_a_block_handed_out_again_is_empty():
    pool = cached_pool(2, [A])
    assert pool.allocate(1) == [1]
    assert pool.num_free_cached == 0
    pool.release([1])
    assert (pool.num_free, pool.num_free_cached) == (1, 0)
    assert pool.acquire_cached(A, (1,)) is None


def test_the_same_content_in_two_blocks_stays_with_the_first():
    pool = BlockPool(4)
    pool.allocate(2)
    pool.remember(1, A, (7,))
    pool.remember(2, A, (7,))
    assert pool.acquire_cached(A, (7,)) == 1
    pool.check_integrity([[1], [2], [1]])
    pool.release([2])
    assert pool.num_free_cached == 0  # block 2 is private, so empty once released
    pool.release([1, 1])
    assert pool.num_free_cached == 1


def test_remembering_a_block_twice_changes_nothing():
    pool = BlockPool(3)
    pool.allocate(1)
    pool.remember(1, A, (7,))
    pool.remember(1, A, (7,))
    pool.release([1])
    assert pool.num_free_cached == 1
    pool.check_integrity([])


def test_a_block_that_nobody_holds_cannot_be_released():
    pool = BlockPool(3)
    held = pool.allocate(1)
    pool.release(held)
    with pytest.raises(ValueError, match="block 1 is not referenced"):
        pool.release(held)
    pool.check_integrity([])


def test_forgetting_all_keeps_references_and_empties_the_cache():
    pool = cached_pool(4, [A, B])
    held = pool.acquire_cached(B, (2,))
    pool.forget_all()
    assert (pool.num_free, pool.num_free_cached) == (2, 0)
    assert pool.acquire_cached(A, (1,)) is None
    assert pool.acquire_cached(B, (2,)) is None
    pool.check_integrity([[held]])
    pool.release([held])
    assert (pool.num_free, pool.num_free_cached) == (3, 0)


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ([[1]], "is in 0 tables"),  # block 2 is held, but in no table
        ([[1, 2], [2]], "is in 2 tables"),
        ([[1, 2, 3]], "is in 1 tables"),
        ([[0, 1, 2]], "block 0 was handed out"),
    ],
)
def test_the_integrity_check_finds(tables, complaint):
    pool = BlockPool(5)
    pool.allocate(2)
    with pytest.raises(AssertionError, match=complaint):
        pool.check_integrity(tables)


def test_blocks_that_somebody_has_still_to_write_to_are_not_handed_out_and_not_hit():
    pool = cached_pool(6, [A, B])  # blocks 1 and 2; 3, 4 and 5 are empty
    assert pool.allocate(2, {3, 1}) == [4, 5]
    assert pool.allocate(1, {3, 1}) == [2]
    with pytest.raises(ValueError, match="1 blocks asked for, 0 are free"):
        pool.allocate(1, {3, 1})
    assert pool.acquire_cached(A, (1,), {1}) is None
    assert pool.acquire_cached(A, (1,), {2}) == 1
    assert pool.allocate(1) == [3]
