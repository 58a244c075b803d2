from jaxengine.stats import ITERATION_TOKEN_BUCKETS, EngineStats


def test_a_fresh_engine_has_counted_nothing():
    stats = EngineStats()
    assert stats.kv_cache_usage == 0.0
    assert sum(stats.iteration_tokens) == 0


def test_the_histogram_has_a_place_for_steps_beyond_its_last_bound():
    assert len(EngineStats().iteration_tokens) == len(ITERATION_TOKEN_BUCKETS) + 1
    assert list(ITERATION_TOKEN_BUCKETS) == [2**n for n in range(15)]


def test_usage_is_the_share_of_blocks_that_requests_hold():
    assert EngineStats(num_blocks=8, num_free_blocks=8).kv_cache_usage == 0.0
    assert EngineStats(num_blocks=8, num_free_blocks=6).kv_cache_usage == 0.25
    assert EngineStats(num_blocks=8, num_free_blocks=0).kv_cache_usage == 1.0


def test_cached_blocks_that_nobody_holds_are_not_in_use():
    stats = EngineStats(num_blocks=8, num_free_blocks=8, num_cached_blocks=5)
    assert stats.kv_cache_usage == 0.0
