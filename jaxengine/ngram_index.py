"""Where the last tokens of a growing sequence have been before.

Texts repeat themselves: code that is edited, documents that are quoted, names. What followed an
n-gram the last time is a good guess at what follows now, and costs a look into a dict.
"""

from collections.abc import Sequence

__all__ = ["NgramIndex"]

# Lengths that are looked up, the longer first: a long match says more, and is rarer.
SIZES = (4, 2)


class NgramIndex:
    """Maps n-grams to the place after their latest occurrence. Each token costs the same to add.

    The sequence itself stays with its owner, who passes it to each call; it may only grow.
    """

    def __init__(self) -> None:
        self._places: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in SIZES)
        self.num_tokens = 1  # the first token follows nothing

    def add(self, token_ids: Sequence[int], end: int) -> None:
        """Note what each of the first `end` tokens follows, as far as that is not known yet."""
        for place in range(self.num_tokens, end):
            for size, places in zip(SIZES, self._places, strict=True):
                if place >= size:
                    places[tuple(token_ids[place - size : place])] = place
        self.num_tokens = max(self.num_tokens, end)

    def find(self, token_ids: Sequence[int], end: int) -> int | None:
        """Return the place after the latest occurrence of the n-gram that ends before `end`.

        Only occurrences that something follows count, so it is no place but an earlier one, if
        the tokens before `end` and no more were added.
        """
        for size, places in zip(SIZES, self._places, strict=True):
            if end >= size:
                place = places.get(tuple(token_ids[end - size : end]))
                if place is not None:
                    return place
        return None
