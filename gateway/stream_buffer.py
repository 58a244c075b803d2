"""The output of one stream that still has to be sent, merged; and what may have to be sent again.

A delta gets its number when it is taken, and a number never means another place in the text: so
whoever has everything up to a number can go on from there, on whatever connection.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable
from typing import Protocol

__all__ = ["NumberedOutput", "PlainBuffer", "ResumeBuffer", "ResumeGap", "StreamBuffer"]

type NumberedOutput = tuple[int, str, list[int]]  # seq, text, token ids


class ResumeGap(Exception):
    """What comes after the asked number is no longer kept, or never was."""


class StreamBuffer(Protocol):
    """Takes output in small pieces and gives it out merged and numbered."""

    @property
    def next_seq(self) -> int:
        """The number after the newest delta."""
        ...

    @property
    def has_unsent(self) -> bool: ...

    def put(self, text: str, token_ids: tuple[int, ...]) -> None:
        """Add output; the ids are left out unless the client asked for them."""
        ...

    def take(self) -> NumberedOutput:
        """Return all that is unsent; call it only if there is any."""
        ...


class PlainBuffer:
    """Forgets what it has given out."""

    def __init__(self, *, with_token_ids: bool) -> None:
        self.next_seq = 0
        self._with_token_ids = with_token_ids
        self._texts: list[str] = []
        self._token_ids: list[int] = []

    @property
    def has_unsent(self) -> bool:
        return bool(self._texts or self._token_ids)

    def put(self, text: str, token_ids: tuple[int, ...]) -> None:
        if text:
            self._texts.append(text)
        if self._with_token_ids:
            self._token_ids.extend(token_ids)

    def take(self) -> NumberedOutput:
        output = (self.next_seq, "".join(self._texts), list(self._token_ids))
        self.next_seq += 1
        self._texts.clear()
        self._token_ids.clear()
        return output


class ResumeBuffer:
    """Keeps what it has given out, the newest `max_bytes` of it, to give it out again.

    All text is one piece of UTF-8, with an array of the places where deltas end. So a kept delta
    costs 16 bytes besides its text, and to send everything after a number is one slice.

    Args:
        max_bytes: beyond, the oldest deltas that were sent are forgotten. What is unsent never is.
        on_growth: told how many bytes more are held, or less.
    """

    def __init__(
        self, *, with_token_ids: bool, max_bytes: int, on_growth: Callable[[int], None]
    ) -> None:
        self._with_token_ids = with_token_ids
        self._max_bytes = max_bytes
        self._on_growth = on_growth
        self._num_bytes = 0
        self._text = bytearray()
        self._ids = array("i")
        # Places are counted from the beginning of the answer; these are of the first kept ones.
        self._text_start = self._id_start = 0
        # Where the deltas end, from the one before the first that is kept.
        self._text_ends = array("q", [0])
        self._id_ends = array("q", [0])
        self._first_seq = 0
        self._text_sent = self._ids_sent = 0
        self._is_cleared = False

    @property
    def next_seq(self) -> int:
        return self._first_seq + len(self._text_ends) - 1

    @property
    def has_unsent(self) -> bool:
        return self._text_sent < self._text_end or self._ids_sent < self._id_end

    @property
    def num_unsent_bytes(self) -> int:
        return (
            self._text_end - self._text_sent + self._ids.itemsize * (self._id_end - self._ids_sent)
        )

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self._num_bytes

    @property
    def _text_end(self) -> int:
        return self._text_start + len(self._text)

    @property
    def _id_end(self) -> int:
        return self._id_start + len(self._ids)

    def put(self, text: str, token_ids: tuple[int, ...]) -> None:
        if self._is_cleared:
            return
        self._text += text.encode(errors="surrogatepass")
        if self._with_token_ids:
            self._ids.extend(token_ids)
        self._note_growth()

    def take(self) -> NumberedOutput:
        text = self._text[self._text_sent - self._text_start :].decode(errors="surrogatepass")
        ids = self._ids[self._ids_sent - self._id_start :].tolist()
        self._text_sent, self._ids_sent = self._text_end, self._id_end
        # What is sent again and nothing else keeps the number of the last delta that it holds.
        if self._text_sent > self._text_ends[-1] or self._ids_sent > self._id_ends[-1]:
            self._text_ends.append(self._text_sent)
            self._id_ends.append(self._ids_sent)
        self._note_growth()
        if self._num_bytes > self._max_bytes:
            self._forget_oldest()
        return self.next_seq - 1, text, ids

    def rewind(self, after: int) -> None:
        """Let the next delta hold everything after the delta with this number; -1 is before all.

        Raises:
            ResumeGap: that is not kept.
        """
        index = after - self._first_seq + 1
        if self._is_cleared or not 0 <= index < len(self._text_ends):
            raise ResumeGap
        self._text_sent = self._text_ends[index]
        self._ids_sent = self._id_ends[index]

    def forget_sent(self) -> None:
        """Forget everything that was sent: only who has all of it can still go on."""
        self._forget(bisect_right(self._text_ends, self._text_sent) - 1)

    def clear(self) -> None:
        """Forget everything for good, and whatever may yet come."""
        self._is_cleared = True
        self._text.clear()
        self._ids = array("i")
        self._text_ends, self._id_ends = array("q", [0]), array("q", [0])
        self._text_start = self._id_start = self._text_sent = self._ids_sent = 0
        self._note_growth()

    def _forget_oldest(self) -> None:
        """Forget half of the deltas, as far as they were sent; by halves it costs nothing each."""
        num_sent = bisect_right(self._text_ends, self._text_sent) - 1
        self._forget(min(num_sent, max(1, (len(self._text_ends) - 1) // 2)))

    def _forget(self, num_forgotten: int) -> None:
        if num_forgotten <= 0:
            return
        del self._text_ends[:num_forgotten], self._id_ends[:num_forgotten]
        self._first_seq += num_forgotten
        del self._text[: self._text_ends[0] - self._text_start]
        del self._ids[: self._id_ends[0] - self._id_start]
        self._text_start, self._id_start = self._text_ends[0], self._id_ends[0]
        self._note_growth()

    def _note_growth(self) -> None:
        num_bytes = (
            len(self._text)
            + self._ids.itemsize * len(self._ids)
            + 2 * self._text_ends.itemsize * (len(self._text_ends) - 1)
        )
        growth, self._num_bytes = num_bytes - self._num_bytes, num_bytes
        self._on_growth(growth)
