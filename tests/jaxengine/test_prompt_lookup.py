import pytest

from jaxengine.prompt_lookup import FIRST_CHANCE, MOST_AT_ONCE, MOST_CHANCE, RATE, PromptLookup


class Text:
    """A prompt that tokens are added to, and the lookup over both."""

    def __init__(self, *prompt: int) -> None:
        self.token_ids = list(prompt)
        self.lookup = PromptLookup(self.token_ids, len(prompt))
        self.lookup.catch_up()

    def append(self, *token_ids: int) -> None:
        for token_id in token_ids:
            self.token_ids.append(token_id)
            self.lookup.catch_up()


def test_what_followed_the_last_time_is_guessed():
    text = Text(5, 1, 2, 7, 8, 9, 1, 2)
    assert text.lookup.has_guess
    assert text.lookup.guess(3) == [7, 8, 9]


def test_where_nothing_repeats_nothing_is_guessed():
    text = Text(1, 2, 3, 4, 5)
    assert not text.lookup.has_guess
    assert text.lookup.guess(3) == []


def test_a_guess_that_reaches_the_end_goes_on_from_its_own_beginning():
    # 1 2 3 1 2 is followed by 3 1 2 and again 3 1 2.
    assert Text(1, 2, 3, 1, 2).lookup.guess(7) == [3, 1, 2, 3, 1, 2, 3]
    assert Text(4, 4, 4).lookup.guess(4) == [4, 4, 4, 4]


def test_a_guess_that_came_true_goes_on_where_it_was():
    # After 1 2 came 3 the last time, but 7 in the text that is being followed.
    text = Text(9, 8, 1, 2, 7, 6, 5, 1, 2, 3, 4, 9)
    text.append(8)  # 9 8 is known from the beginning
    assert text.lookup.guess(4) == [1, 2, 7, 6]
    text.append(1, 2)
    assert text.lookup.guess(2) == [7, 6]


def test_a_guess_that_fails_is_looked_up_anew():
    text = Text(1, 2, 3, 5, 6, 7, 1, 2)
    text.append(5)
    assert not text.lookup.has_guess  # 2 5 is new
    text.append(6)
    assert text.lookup.guess(1) == [7]


def test_the_chance_follows_what_came_true():
    text = Text(1, 2, 3, 4, 1, 2)
    assert text.lookup.chance == FIRST_CHANCE == 0.5
    text.append(3)
    after_one = 0.5 + RATE * (MOST_CHANCE - 0.5)
    assert text.lookup.chance == pytest.approx(after_one)
    text.append(9)
    assert text.lookup.chance == pytest.approx(after_one * (1 - RATE))


def test_tokens_that_nobody_guessed_change_no_chance():
    text = Text(1, 2, 3)
    text.append(4, 5, 6)
    assert text.lookup.chance == FIRST_CHANCE


def test_several_tokens_at_once_are_as_good_as_one_by_one():
    tokens = (3, 4, 1, 2, 9, 1, 2, 3, 3, 4)
    one_by_one, together = Text(1, 2, 3, 4, 1, 2), Text(1, 2, 3, 4, 1, 2)
    one_by_one.append(*tokens)
    together.token_ids += tokens
    together.lookup.catch_up()
    assert together.lookup.chance == one_by_one.lookup.chance
    assert together.lookup.guess(5) == one_by_one.lookup.guess(5)


def test_a_long_prompt_is_taken_in_bit_by_bit_and_says_nothing_about_chances():
    text = Text(*[1, 2, 3] * MOST_AT_ONCE)  # three times as much as is taken in at once
    calls = 1
    while not text.lookup.has_guess:
        text.lookup.catch_up()
        calls += 1
    assert calls == 3
    assert text.lookup.guess(4) == [1, 2, 3, 1]
    assert text.lookup.chance == FIRST_CHANCE
