from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.detokenizer import Detokenizer, StopStrings

# Tokens are byte strings here: the table is the identity, by position.
byte_tokens = st.lists(st.binary(min_size=0, max_size=4), max_size=12)


def decoded(tokens):
    detokenizer = Detokenizer(tokens.__getitem__)
    return [detokenizer.push(i) for i in range(len(tokens))] + [detokenizer.flush()]


@given(byte_tokens)
def test_joined_texts_equal_the_decoded_bytes_of_all_tokens(tokens):
    assert "".join(decoded(tokens)) == b"".join(tokens).decode("utf-8", "replace")


@given(st.text(max_size=20), st.data())
def test_valid_utf8_cut_anywhere_never_shows_a_replacement_character(text, data):
    raw = text.replace("\ufffd", "").encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=8)) | {0, len(raw)})
    pieces = decoded([raw[a:b] for a, b in pairwise(cuts)])
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_emoji_of_several_code_points_comes_code_point_by_code_point():
    raw = "🧎‍♀️".encode()  # 4 code points, 13 bytes
    pieces = decoded([bytes([b]) for b in raw])
    assert [piece for piece in pieces if piece] == ["🧎", "\u200d", "♀", "\ufe0f"]


def test_an_unfinished_code_point_becomes_one_replacement_character_at_the_end():
    assert decoded([b"ok", b"\xf0\x9f"]) == ["ok", "", "\ufffd"]


def test_an_invalid_byte_becomes_a_replacement_character_at_once():
    assert decoded([b"\xff", b"a"]) == ["\ufffd", "a", ""]


def pushed(stops, pieces, include=False):
    matcher = StopStrings(stops, include=include)
    return [matcher.push(piece) for piece in pieces] + [matcher.flush()], matcher.matched


def test_nothing_of_a_stop_string_is_sent_when_it_comes_in_pieces():
    texts, matched = pushed(["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "JKL"])
    assert texts == ["ABC", "", "", "", "", ""]
    assert matched == "DEFGHIJ"


def test_what_turns_out_not_to_be_a_stop_string_is_sent():
    texts, matched = pushed(["DEFGHIJ"], ["ABCDEF", "X", "DE"])
    assert texts == ["ABC", "DEFX", "", "DE"]
    assert matched is None


def test_only_the_longest_end_that_may_begin_a_stop_string_is_held():
    texts, _ = pushed(["aab"], ["aaa"])
    assert texts == ["a", "aa"]


def test_the_text_is_cut_at_the_character_inside_a_token():
    assert pushed(["\n\n"], ["one\n\ntwo"]) == (["one", ""], "\n\n")


def test_the_stop_string_that_is_complete_first_wins():
    assert pushed(["cd", "b"], ["abcd"]) == (["a", ""], "b")


def test_of_two_stop_strings_that_end_together_the_longer_wins():
    assert pushed(["b", "ab"], ["xab"]) == (["x", ""], "ab")


def test_the_stop_string_is_kept_when_asked_for():
    assert pushed(["DEF"], ["ABCD", "EFG"], include=True) == (["ABC", "DEF", ""], "DEF")


def test_after_a_match_nothing_more_is_sent():
    matcher = StopStrings(["."])
    assert [matcher.push("a."), matcher.push("b"), matcher.flush()] == ["a", "", ""]


def test_without_stop_strings_everything_is_sent_at_once():
    assert pushed([], ["a", "b"]) == (["a", "b", ""], None)


letters = st.text(alphabet="abc", max_size=24)


def first_stop(text, stops):
    """Return (start, stop) of the first complete stop string, by trying every prefix."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return end - len(longest), longest
    return None


@given(letters, st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_the_result_does_not_depend_on_how_the_text_is_cut(text, stops, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)) | {0, len(text)})
    pieces = [text[a:b] for a, b in pairwise(cuts)]
    texts, matched = pushed(stops, pieces)
    found = first_stop(text, stops)
    if found is None:
        assert ("".join(texts), matched) == (text, None)
    else:
        start, stop = found
        assert ("".join(texts), matched) == (text[:start], stop)


@given(letters, st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_what_is_held_back_begins_a_stop_string_and_nothing_longer_does(text, stops):
    if first_stop(text, stops) is not None:
        return
    matcher = StopStrings(stops)
    sent = matcher.push(text)
    begins = [n for n in range(len(text) + 1) if any(s.startswith(text[n:]) for s in stops)]
    assert len(sent) == min(begins)


@pytest.mark.parametrize("length", [1, 1024])
def test_a_repetitive_stop_string_is_found(length):
    stop = "a" * length + "b"
    assert pushed([stop], ["a" * (2 * length), "b"]) == (["a" * length, "", ""], stop)
