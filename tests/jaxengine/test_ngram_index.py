import pytest

from jaxengine.ngram_index import NgramIndex


def index_of(token_ids, num_added=None):
    index = NgramIndex()
    index.add(token_ids, len(token_ids) if num_added is None else num_added)
    return index


def test_the_last_two_tokens_are_found_where_they_were_before():
    token_ids = [5, 1, 2, 7, 1, 2]
    assert index_of(token_ids).find(token_ids, 6) == 3  # the place of 7


def test_of_several_places_the_latest_is_taken():
    token_ids = [1, 2, 7, 1, 2, 8, 1, 2]
    assert index_of(token_ids).find(token_ids, 8) == 5


def test_four_equal_tokens_say_more_than_two():
    # 1 2 was followed by 9 just now, but 3 4 1 2 by 7.
    token_ids = [3, 4, 1, 2, 7, 6, 1, 2, 9, 3, 4, 1, 2]
    assert index_of(token_ids).find(token_ids, 13) == 4


def test_what_ends_the_sequence_is_no_place_before_it():
    token_ids = [1, 2, 3, 4, 5]
    assert index_of(token_ids).find(token_ids, 5) is None


@pytest.mark.parametrize("token_ids", [[], [1], [1, 2], [1, 1]])
def test_too_short_a_sequence_has_no_places(token_ids):
    assert index_of(token_ids).find(token_ids, len(token_ids)) is None


def test_a_token_that_repeats_is_its_own_successor():
    token_ids = [1, 1, 1]
    assert index_of(token_ids).find(token_ids, 3) == 2


def test_tokens_may_be_added_one_by_one_or_all_at_once():
    token_ids = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]
    one_by_one = NgramIndex()
    for end in range(len(token_ids) + 1):
        one_by_one.add(token_ids, end)
    assert one_by_one.num_tokens == 11
    ends = range(2, 12)
    at_once = index_of(token_ids)
    assert [one_by_one.find(token_ids, end) for end in ends] == [
        at_once.find(token_ids, end) for end in ends
    ]


def test_only_what_was_added_is_found():
    token_ids = [1, 2, 7, 1, 2, 8, 1, 2]
    assert index_of(token_ids, num_added=5).find(token_ids, 8) == 2
