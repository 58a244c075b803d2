import pytest

from bench.simulation.cache_cost import Bookkeeping, measure_bookkeeping
from jaxengine.kv_cache_manager import KVCacheManager


class Clock:
    """Advances by the work that the cache does: a second for each block that gets a hash."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_what_caching_adds_is_the_difference_for_each_token():
    found = Bookkeeping(num_tokens=2000, on_s=0.005, off_s=0.001)
    assert found.extra_s == pytest.approx(0.004)
    assert found.us_per_token == pytest.approx(2.0)


def test_only_the_work_of_the_cache_is_counted(monkeypatch):
    clock = Clock()
    hash_block = KVCacheManager._hash

    def slow_hash(self, request, index):
        clock.now_s += len(request.block_hashes) <= index
        return hash_block(self, request, index)

    monkeypatch.setattr(KVCacheManager, "_hash", slow_hash)
    prompts = [[number] * 40 for number in range(6)]
    found = measure_bookkeeping(prompts, 8, num_rows=2, clock=clock)
    # 40 and 8 tokens fill three blocks of 16. The last token of an answer is never computed, so
    # the third block is never full: two hashes for each of six requests.
    assert (found.on_s, found.off_s, found.num_tokens) == (12.0, 0.0, 6 * 48)


def test_prompts_that_begin_alike_are_a_mistake():
    with pytest.raises(AssertionError, match="nothing in common"):
        measure_bookkeeping([[1] * 40] * 5, 8, num_rows=2)
