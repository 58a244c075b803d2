import pytest

from jaxengine.engine_options import EngineOptions


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("kv_cache_memory_bytes", "num_kv_blocks"),
        ("kv_cache_memory_bytes", "kv_cache_memory_share"),
        ("kv_cache_memory_share", "num_kv_blocks"),
    ],
)
def test_the_size_of_the_cache_is_said_in_one_way(first, second):
    with pytest.raises(ValueError, match=f"give only one of {first} and {second}"):
        EngineOptions(**{first: 1, second: 1})


@pytest.mark.parametrize("share", [0, -0.5, 1.01, float("nan")])
def test_a_share_is_a_part_of_the_whole(share):
    with pytest.raises(ValueError, match="kv_cache_memory_share"):
        EngineOptions(kv_cache_memory_share=share)


@pytest.mark.parametrize(
    "name", ["kv_cache_memory_bytes", "kv_cache_memory_share", "num_kv_blocks"]
)
def test_each_way_to_say_it_sizes_the_cache(name):
    assert not EngineOptions().sizes_cache
    assert EngineOptions(**{name: 1}).sizes_cache
