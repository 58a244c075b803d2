"""What the tokens of a request say about its next ones, and how often that comes true."""

from jaxengine.ngram_index import NgramIndex

__all__ = ["PromptLookup"]

# Tokens taken in by one call: half a millisecond, so that a long prompt delays no step.
MOST_AT_ONCE = 1024

# How sure we are of guesses before the first has come true, and how fast that changes: about the
# last ten guesses count.
FIRST_CHANCE = 0.5
RATE = 0.1

# Nothing is certain, however often it was right.
MOST_CHANCE = 0.98


class PromptLookup:
    """Guesses the next tokens of one request: those that followed the last time.

    A guess that comes true goes on where it was, so that a copied text is followed through phrases
    that it has twice. Each token of the answer that is guessed is compared with what comes, whether
    somebody used the guess or not; so it is known at no cost whether guesses are any good.

    Args:
        token_ids: of the request; the list that grows.
        num_prompt_tokens: of these are its prompt, and say nothing about guesses.

    Attributes:
        chance: of the next guess to come true, by those before it.
    """

    def __init__(self, token_ids: list[int], num_prompt_tokens: int) -> None:
        self._token_ids = token_ids
        self._num_prompt_tokens = num_prompt_tokens
        self._index = NgramIndex()
        self._source: int | None = None  # place whose token is the guess
        self.chance = FIRST_CHANCE

    @property
    def has_guess(self) -> bool:
        """Whether all tokens are taken in, and something like their end has been there before."""
        return self._source is not None

    def catch_up(self) -> None:
        """Take in the tokens that have come, or a part of them if these are many."""
        token_ids, index = self._token_ids, self._index
        num_before, num_tokens = index.num_tokens, len(token_ids)
        if num_before == num_tokens:
            return
        if num_before < self._num_prompt_tokens:
            num_tokens = min(num_tokens, num_before + MOST_AT_ONCE)
            index.add(token_ids, min(num_tokens, self._num_prompt_tokens))
            num_before = index.num_tokens
        for place in range(num_before, num_tokens):
            source = self._source
            if source is None:
                source = index.find(token_ids, place)
            index.add(token_ids, place + 1)
            self._source = None
            if source is not None:
                is_true = token_ids[source] == token_ids[place]
                self.chance += RATE * (is_true * MOST_CHANCE - self.chance)
                if is_true:
                    self._source = source + 1
        if self._source is None and num_tokens == len(token_ids):
            self._source = index.find(token_ids, num_tokens)

    def guess(self, most: int) -> list[int]:
        """Return the next tokens. What runs into the end of the sequence repeats itself."""
        source, token_ids = self._source, self._token_ids
        if source is None:
            return []
        guessed = token_ids[source : source + most]
        period = len(guessed)
        while len(guessed) < most:
            guessed.append(guessed[len(guessed) - period])
        return guessed
