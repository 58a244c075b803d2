"""Tokens to text while they come: whole code points, and nothing that a stop string may claim."""

import codecs
from collections.abc import Callable, Sequence

__all__ = ["Detokenizer", "StopStrings"]


class Detokenizer:
    """Decodes tokens one by one.

    All texts joined, with `flush` at the end, equal the joined bytes of the tokens decoded as
    UTF-8 with U+FFFD for what is invalid; no text ever ends inside a code point.

    Args:
        token_bytes: bytes that a token adds; none for special tokens.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_inside = False  # a code point

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, often but not always its own."""
        added = self._token_bytes(token_id)
        if added.isascii() and not self._is_inside:
            return added.decode("ascii")
        text = self._decoder.decode(added)
        self._is_inside = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """Return what is left at the end: U+FFFD if the last code point is unfinished."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Looks for stop strings in a growing text, and holds back what may be the start of one.

    The stop string that is complete first wins; of two that end at the same character, the
    longer. What is held back is never more than the longest end of the text that begins a
    stop string. The result does not depend on how the text was cut into pieces.

    Args:
        stops: stop strings, none of them empty.
        include: whether the stop string itself belongs to the answer.

    Attributes:
        matched: the stop string that ended the text, once one has.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        # Longest first, so that it wins among those that end at the same character.
        self._automata = [_Automaton(stop) for stop in sorted(stops, key=len, reverse=True)]
        self.include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return what can be sent now. After a match: nothing more, whatever is pushed."""
        if not self._automata:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        for position in range(len(self._held), len(text)):
            # Every automaton sees every character up to the match, so that none misses one.
            for automaton in self._automata:
                if automaton.step(text[position]) and self.matched is None:
                    self.matched = automaton.stop
            if self.matched is not None:
                self._held = ""
                return text[: position + 1 - (0 if self.include else len(self.matched))]
        num_held = max(automaton.num_matched for automaton in self._automata)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Return what was held back; the text ends here."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Knuth-Morris-Pratt: linear in the text, however long and repetitive the stop string is.

    Attributes:
        num_matched: length of the longest end of the text so far that begins the stop string.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        # _fallback[n] is the longest proper end of stop[:n] that also begins it.
        self._fallback = [0, 0]
        for n in range(1, len(stop)):
            k = self._fallback[n]
            while k and stop[n] != stop[k]:
                k = self._fallback[k]
            self._fallback.append(k + 1 if stop[n] == stop[k] else 0)

    def step(self, char: str) -> bool:
        """Take one more character; return whether the stop string is now complete."""
        n = self.num_matched
        while n and char != self.stop[n]:
            n = self._fallback[n]
        self.num_matched = n + 1 if char == self.stop[n] else 0
        return self.num_matched == len(self.stop)
