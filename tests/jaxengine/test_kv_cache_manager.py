import pytest

from jaxengine.kv_cache_manager import KVCacheManager
from jaxengine.request import Request
from jaxengine.sampling_params import SamplingParams


def manager(num_blocks: int = 11, *, caching: bool = True) -> KVCacheManager:
    """Blocks of 8 tokens; 10 that can be used."""
    return KVCacheManager(num_blocks=num_blocks, block_size=8, enable_prefix_caching=caching)


def make_request(name: str, prompt, *, salt: str | None = None, tenant: str = "") -> Request:
    return Request(
        name,
        tuple(prompt),
        SamplingParams(max_tokens=100),
        seed=0,
        arrival_time_s=0.0,
        cache_salt=salt,
        tenant=tenant,
    )


def compute(kv: KVCacheManager, request: Request, num_tokens: int | None = None) -> None:
    """Do as the scheduler does with a chunk: reserve, remember, then count it as computed."""
    if num_tokens is None:
        num_tokens = request.num_tokens - request.num_computed_tokens
    end = request.num_computed_tokens + num_tokens
    assert kv.reserve(request, end)
    kv.remember(request, end)
    request.num_computed_tokens += num_tokens


def admit(kv: KVCacheManager, request: Request) -> int:
    """Do as the scheduler does with a new request that is computed in one step."""
    request.num_computed_tokens = kv.match_prefix(request)
    num_cached = request.num_computed_tokens
    compute(kv, request)
    return num_cached


def test_a_request_gets_as_many_blocks_as_its_tokens_fill_and_not_one_more():
    kv = manager()
    request = make_request("a", range(20))
    assert kv.blocks_needed(request, 8) == 1
    assert kv.blocks_needed(request, 9) == 2
    compute(kv, request, 8)
    assert request.block_ids == [1]
    compute(kv, request, 1)
    assert request.block_ids == [1, 2]
    compute(kv, request, 7)  # up to the end of block 2
    assert request.block_ids == [1, 2]
    assert kv.blocks_needed(request, 16) == 0
    compute(kv, request, 4)
    assert request.block_ids == [1, 2, 3]
    assert kv.num_free_blocks == 7
    kv.check_integrity()


def test_too_few_free_blocks_change_nothing():
    kv = manager(4)
    first, second = make_request("a", range(16)), make_request("b", range(100, 116))
    compute(kv, first)
    compute(kv, second, 8)
    assert not kv.reserve(second, 16)
    assert first.block_ids == [1, 2]
    assert second.block_ids == [3]
    assert kv.num_free_blocks == 0
    kv.check_integrity()


def test_free_returns_everything():
    kv = manager()
    request = make_request("a", range(20))
    admit(kv, request)
    kv.free(request)
    assert kv.num_free_blocks == kv.num_blocks == 10
    assert kv.num_cached_blocks == 2
    kv.check_integrity()


def test_freeing_a_request_without_blocks_is_harmless():
    kv = manager()
    kv.free(make_request("a", range(20)))
    assert kv.num_free_blocks == 10


@pytest.mark.parametrize(
    ("num_tokens", "num_cached"), [(1, 0), (7, 0), (8, 0), (9, 8), (16, 8), (17, 16), (24, 16)]
)
def test_the_last_token_of_a_prompt_is_never_taken_from_the_cache(num_tokens, num_cached):
    kv = manager()
    admit(kv, make_request("a", range(24)))
    assert admit(kv, make_request("b", range(num_tokens))) == num_cached
    kv.check_integrity()


def test_a_hit_shares_the_blocks_of_the_prefix_and_no_other():
    kv = manager()
    first, second = make_request("a", range(20)), make_request("b", [*range(16), 99, 99])
    admit(kv, first)
    admit(kv, second)
    assert first.block_ids == [1, 2, 3]
    assert second.block_ids == [1, 2, 4]
    kv.free(first)
    assert kv.num_free_blocks == 7  # block 3 came back; the shared ones are still held
    kv.check_integrity()


def test_blocks_outlive_their_request():
    kv = manager()
    first = make_request("a", range(20))
    admit(kv, first)
    kv.free(first)
    second = make_request("b", range(20))
    assert admit(kv, second) == 16
    assert list(second.block_ids)[:2] == [1, 2]


def test_beginnings_stay_cached_longer_than_tails():
    kv = manager(4)
    first = make_request("a", range(24))
    admit(kv, first)
    kv.free(first)
    other = make_request("b", range(100, 108))
    admit(kv, other)
    assert other.block_ids == [3]  # the tail of "a" gave way
    kv.free(other)
    assert kv.match_prefix(make_request("c", range(24))) == 16


def test_two_prompts_equal_in_the_second_block_only_do_not_share_it():
    kv = manager()
    first = make_request("a", [*[1] * 8, *[7] * 8, 0])
    second = make_request("b", [*[2] * 8, *[7] * 8, 0])
    admit(kv, first)
    assert admit(kv, second) == 0
    assert not set(first.block_ids) & set(second.block_ids)


def test_a_match_ends_at_the_first_block_that_differs():
    kv = manager()
    admit(kv, make_request("a", range(32)))
    prompt = [*range(8), *[99] * 8, *range(16, 32)]
    assert kv.match_prefix(make_request("b", prompt)) == 8


def test_another_token_anywhere_in_a_block_is_a_miss():
    kv = manager()
    admit(kv, make_request("a", range(9)))
    for place in range(8):
        prompt = list(range(9))
        prompt[place] += 1
        request = make_request(f"b{place}", prompt)
        assert kv.match_prefix(request) == 0


SALTS = [None, "", "a", "b", "None", "\x00", "\x01", "é", "\ud800"]


@pytest.mark.parametrize("salt", SALTS)
def test_a_salt_shares_with_itself_only(salt):
    kv = manager()
    admit(kv, make_request("first", range(17), salt=salt))
    for index, other in enumerate(SALTS):
        expected = 16 if other == salt else 0
        request = make_request(f"r{index}", range(17), salt=other)
        assert kv.match_prefix(request) == expected, repr(other)
        kv.free(request)


def test_a_tenant_shares_with_itself_only_whatever_its_salt():
    kv = manager()
    admit(kv, make_request("a", range(17), tenant="alice", salt="s"))
    for tenant, salt, expected in [
        ("alice", "s", 16),
        ("alice", None, 0),
        ("bob", "s", 0),
        ("", "s", 0),
        ("", "alices", 0),
        ("alic", "es", 0),
    ]:
        request = make_request("b", range(17), tenant=tenant, salt=salt)
        assert kv.match_prefix(request) == expected, (tenant, salt)
        kv.free(request)


def test_a_salt_that_spells_token_ids_is_no_prefix():
    kv = manager()
    admit(kv, make_request("a", [0] * 9, salt="\x00" * 64))
    assert kv.match_prefix(make_request("b", [0] * 17)) == 0


def test_large_token_ids_have_hashes():
    kv = manager()
    admit(kv, make_request("a", [2**31 + n for n in range(9)]))
    assert kv.match_prefix(make_request("b", [2**31 + n for n in range(9)])) == 8


def test_a_block_is_cached_once_all_its_tokens_are_scheduled():
    kv = manager()
    request, probe = make_request("a", range(20)), make_request("b", range(20))
    compute(kv, request, 7)
    assert kv.match_prefix(probe) == 0
    kv.free(probe)
    compute(kv, request, 1)
    assert kv.match_prefix(probe) == 8
    kv.free(probe)
    compute(kv, request, 8)
    assert kv.match_prefix(probe) == 16


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 8, 9, 16, 23])
def test_chunks_of_any_size_cache_the_same_blocks(chunk):
    kv = manager()
    request = make_request("a", range(23))
    while request.num_computed_tokens < 23:
        compute(kv, request, min(chunk, 23 - request.num_computed_tokens))
    kv.free(request)
    assert kv.num_cached_blocks == 2
    assert kv.match_prefix(make_request("b", range(24))) == 16


def test_sampled_tokens_are_cached_like_prompt_tokens():
    kv = manager()
    request = make_request("a", range(6))
    compute(kv, request)
    for token_id in (100, 101, 102):
        request.token_ids.append(token_id)
        compute(kv, request)
    assert kv.match_prefix(make_request("b", [*range(6), 100, 101, 102])) == 8


def test_a_block_whose_last_token_was_pending_is_cached_once_that_token_is_known():
    kv = manager()
    request = make_request("a", range(7))
    compute(kv, request)
    request.num_pending_tokens = 1  # sampled, not known yet, and computed all the same
    compute(kv, request)
    probe = make_request("b", [*range(7), 50, 0])
    assert kv.match_prefix(probe) == 0
    kv.free(probe)
    request.token_ids.append(50)  # it arrives, and the next one is pending
    compute(kv, request)
    assert kv.match_prefix(probe) == 8


def test_a_pending_token_is_given_room():
    kv = manager()
    request = make_request("a", range(8))
    compute(kv, request)
    request.num_pending_tokens = 1
    compute(kv, request)
    assert request.block_ids == [1, 2]


def test_without_prefix_caching_nothing_is_shared_or_remembered():
    kv = manager(caching=False)
    first = make_request("a", range(20))
    assert admit(kv, first) == 0
    kv.free(first)
    assert kv.num_cached_blocks == 0
    assert admit(kv, make_request("b", range(20))) == 0


def test_a_reset_forgets_all_contents_and_keeps_the_tables():
    kv = manager()
    request = make_request("a", range(20))
    admit(kv, request)
    kv.reset_prefix_cache()
    assert request.block_ids == [1, 2, 3]
    assert kv.match_prefix(make_request("b", range(20))) == 0
    kv.check_integrity()


def test_a_request_that_comes_back_hits_its_own_blocks():
    kv = manager()
    request = make_request("a", range(20))
    admit(kv, request)
    kv.free(request)
    request.num_computed_tokens = 0
    assert admit(kv, request) == 16
    assert list(request.block_ids)[:2] == [1, 2]


def test_matching_a_request_that_holds_blocks_is_a_mistake():
    kv = manager()
    request = make_request("a", range(20))
    admit(kv, request)
    with pytest.raises(AssertionError, match="holds blocks already"):
        kv.match_prefix(request)


def test_lookups_are_counted_in_tokens():
    kv = manager()
    kv.count_prefix_lookup(20, 0)
    kv.count_prefix_lookup(20, 16)
    assert (kv.prefix_queries, kv.prefix_hits) == (40, 16)


def test_a_prefix_ends_before_the_first_block_that_is_not_written_yet():
    kv = manager()
    first = make_request("first", range(40))
    admit(kv, first)
    unfinished = {first.block_ids[2]}
    second = make_request("second", range(40))
    assert kv.match_prefix(second, unfinished) == 16
    assert kv.reserve(second, 40, unfinished)
    assert second.block_ids[:2] == first.block_ids[:2]
    assert not unfinished & set(second.block_ids)
    kv.check_integrity()
