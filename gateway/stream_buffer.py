"""The output of one stream that still has to be sent, merged; and what may have to be sent again.

A delta gets its number when it is taken, and a number never means another place in the text: so
whoever has everything up to a number can go on from there, on whatever connection.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable
from typing import Protocol

__all__ = ["NumberedOutput", "PlainBuffer", "ResumeBuffer", "ResumeGap", "StreamBuffer"]

ID_BYTES = array("i").itemsize
DELTA_BYTES = 2 * array("q").itemsize

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
        # Places are counted from the beginning of the answer: where what is kept begins, how far
        # it was given out, where it ends.
        self._text_start = self._id_start = 0
        self._text_sent = self._ids_sent = 0
        self._text_put = self._ids_put = 0
        # Where the deltas end, from the one before the first that is kept.
        self._text_ends = array("q", [0])
        self._id_ends = array("q", [0])
        self._first_seq = 0
        self._is_cleared = False

    @property
    def next_seq(self) -> int:
        return self._first_seq + len(self._text_ends) - 1

    @property
    def has_unsent(self) -> bool:
        return self._text_sent < self._text_put or self._ids_sent < self._ids_put

    @property
    def num_unsent_bytes(self) -> int:
        return self._text_put - self._text_sent + ID_BYTES * (self._ids_put - self._ids_sent)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self._num_bytes

    def put(self, text: str, token_ids: tuple[int, ...]) -> None:
        if self._is_cleared:
            return
        data = text.encode()
        self._text += data
        self._text_put += len(data)
        growth = len(data)
        if self._with_token_ids:
            self._ids.extend(token_ids)
            self._ids_put += len(token_ids)
            growth += ID_BYTES * len(token_ids)
        self._grow(growth)

    def take(self) -> NumberedOutput:
        text = self._text[self._text_sent - self._text_start :].decode()
        ids = self._ids[self._ids_sent - self._id_start :].tolist() if self._with_token_ids else []
        self._text_sent, self._ids_sent = self._text_put, self._ids_put
        # What is sent again and nothing else keeps the number of the last delta that it holds.
        if self._text_put > self._text_ends[-1] or self._ids_put > self._id_ends[-1]:
            self._text_ends.append(self._text_put)
            self._id_ends.append(self._ids_put)
            self._grow(DELTA_BYTES)
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
        self._forget(self._num_sent())

    def clear(self) -> None:
        """Forget everything for good, and whatever may yet come."""
        self._is_cleared = True
        self._text.clear()
        self._ids = array("i")
        self._text_ends, self._id_ends = array("q", [0]), array("q", [0])
        self._text_sent = self._text_put
        self._ids_sent = self._ids_put
        self._grow(-self._num_bytes)

    def _forget_oldest(self) -> None:
        """Forget half of the deltas, as far as they were sent; by halves it costs nothing each."""
        self._forget(min(self._num_sent(), max(1, (len(self._text_ends) - 1) // 2)))

    def _num_sent(self) -> int:
        """Count the kept deltas up to where it goes on; one may hold text, or only ids."""
        num_texts = bisect_right(self._text_ends, self._text_sent)
        return min(num_texts, bisect_right(self._id_ends, self._ids_sent)) - 1

    def _forget(self, num_deltas: int) -> None:
        if num_deltas <= 0:
            return
        del self._text_ends[:num_deltas], self._id_ends[:num_deltas]
        self._first_seq += num_deltas
        num_text_bytes = self._text_ends[0] - self._text_start
        num_ids = self._id_ends[0] - self._id_start
        del self._text[:num_text_bytes]
        del self._ids[:num_ids]
        self._text_start, self._id_start = self._text_ends[0], self._id_ends[0]
        self._grow(-num_text_bytes - ID_BYTES * num_ids - DELTA_BYTES * num_deltas)

    def _grow(self, growth: int) -> None:
        self._num_bytes += growth
        self._on_growth(growth)
