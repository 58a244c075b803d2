"""The output of one stream that still has to be sent, merged; and what may have to be sent again.

A delta gets its number when it is taken, and a number never means another place in the text: so
whoever has everything up to a number can go on from there, on whatever connection.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from gateway.token_logprobs import TokenLogprob

__all__ = ["NumberedOutput", "PlainBuffer", "ResumeBuffer", "ResumeGap", "StreamBuffer"]


_TOKEN_ID_BYTES = array("i").itemsize


# A delta: its number, and what it adds: text, token ids, log-probabilities.
type NumberedOutput = tuple[int, str, list[int], list[TokenLogprob]]


class ResumeGap(Exception):
    """What comes after the asked number is no longer kept, or never was."""


class StreamBuffer(Protocol):
    """Takes output in small pieces and gives it out merged and numbered."""

    @property
    def next_seq(self) -> int:
        """The number after the newest delta."""
        ...

    @property
    def num_unsent_bytes(self) -> int:
        """What waits to be taken; 0 if nothing does."""
        ...

    def put(
        self, text: str, token_ids: Sequence[int] = (), logprobs: Sequence[TokenLogprob] = ()
    ) -> None:
        """Add output; nothing that the client did not ask for."""
        ...

    def take(self) -> NumberedOutput:
        """Return all that is unsent; call it only if there is any."""
        ...


class PlainBuffer:
    """Forgets what it has given out."""

    def __init__(self) -> None:
        self.next_seq = 0
        self.num_unsent_bytes = 0
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[bytes] = []  # as bytes they are small

    def put(
        self, text: str, token_ids: Sequence[int] = (), logprobs: Sequence[TokenLogprob] = ()
    ) -> None:
        num_bytes = len(text) if text.isascii() else len(text.encode())
        if text:
            self._texts.append(text)
        if token_ids:
            self._token_ids += token_ids
            num_bytes += _TOKEN_ID_BYTES * len(token_ids)
        if logprobs:
            piece = _encoded_logprobs(logprobs)
            self._logprobs.append(piece)
            num_bytes += len(piece)
        self.num_unsent_bytes += num_bytes

    def take(self) -> NumberedOutput:
        logprobs = _decoded_logprobs(b"".join(self._logprobs)) if self._logprobs else []
        output = (self.next_seq, "".join(self._texts), self._token_ids, logprobs)
        self.next_seq += 1
        self.num_unsent_bytes = 0
        self._texts = []
        if self._token_ids:
            self._token_ids = []
        if self._logprobs:
            self._logprobs = []
        return output


class ResumeBuffer:
    """Keeps what it has given out, the newest `max_bytes` of it, to give it out again.

    Args:
        max_bytes: beyond, the oldest deltas that were sent are forgotten. What is unsent never is.
        on_growth: told how many bytes more are held, or less.
    """

    def __init__(self, *, max_bytes: int, on_growth: Callable[[int], None]) -> None:
        self._max_bytes = max_bytes
        self._on_growth = on_growth
        self._num_bytes = 0
        self._tracks = (_Track(), _Track(), _Track())  # text, token ids, log-probabilities
        self._first_seq = 0
        self._is_cleared = False

    @property
    def next_seq(self) -> int:
        return self._first_seq + self._tracks[0].num_deltas

    @property
    def num_unsent_bytes(self) -> int:
        return sum(track.num_unsent for track in self._tracks)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self._num_bytes

    def put(
        self, text: str, token_ids: Sequence[int] = (), logprobs: Sequence[TokenLogprob] = ()
    ) -> None:
        if self._is_cleared:
            return
        pieces = _encoded(text, token_ids, logprobs)
        for track, piece in zip(self._tracks, pieces, strict=True):
            track.put(piece)
        self._grow(sum(map(len, pieces)))

    def take(self) -> NumberedOutput:
        pieces = [track.take() for track in self._tracks]
        # What is sent again and nothing else keeps the number of the last delta that it holds.
        if any(track.is_longer for track in self._tracks):
            self._grow(sum(track.end_delta() for track in self._tracks))
        if self._num_bytes > self._max_bytes:
            self._forget_oldest()
        return _decoded(self.next_seq - 1, *pieces)

    def rewind(self, after: int) -> None:
        """Let the next delta hold everything after the delta with this number; -1 is before all.

        Raises:
            ResumeGap: that is not kept.
        """
        index = after - self._first_seq + 1
        if self._is_cleared or not 0 <= index <= self._tracks[0].num_deltas:
            raise ResumeGap
        for track in self._tracks:
            track.rewind(index)

    def forget_sent(self) -> None:
        """Forget everything that was sent: only who has all of it can still go on."""
        self._forget(self._num_sent())

    def clear(self) -> None:
        """Forget everything for good, and whatever may yet come."""
        self._is_cleared = True
        self._tracks = (_Track(), _Track(), _Track())
        self._grow(-self._num_bytes)

    def _forget_oldest(self) -> None:
        """Forget half of the deltas, as far as they were sent; by halves it costs nothing each."""
        self._forget(min(self._num_sent(), max(1, self._tracks[0].num_deltas // 2)))

    def _num_sent(self) -> int:
        """Count the kept deltas up to where it goes on; one may hold text, or only ids."""
        return min(track.num_sent for track in self._tracks)

    def _forget(self, num_deltas: int) -> None:
        if num_deltas > 0:
            self._first_seq += num_deltas
            self._grow(-sum(track.forget(num_deltas) for track in self._tracks))

    def _grow(self, growth: int) -> None:
        self._num_bytes += growth
        self._on_growth(growth)


class _Track:
    """One kind of output as one piece of bytes, with an array of the places where deltas end.

    So a kept delta costs 8 bytes besides what it holds, and to send everything after a number is
    one slice. Places are counted from the beginning of the answer.
    """

    __slots__ = ("_data", "_ends", "_num_put", "_num_taken", "_start")

    def __init__(self) -> None:
        self._data = bytearray()
        self._start = 0  # where what is kept begins
        self._num_taken = 0
        self._num_put = 0
        self._ends = array("q", [0])  # from the delta before the first that is kept

    @property
    def num_deltas(self) -> int:
        return len(self._ends) - 1

    @property
    def num_unsent(self) -> int:
        return self._num_put - self._num_taken

    @property
    def is_longer(self) -> bool:
        """Whether there is something after the last delta."""
        return self._num_put > self._ends[-1]

    @property
    def num_sent(self) -> int:
        """Deltas that were taken and not rewound."""
        return bisect_right(self._ends, self._num_taken) - 1

    def put(self, data: bytes) -> None:
        self._data += data
        self._num_put += len(data)

    def take(self) -> bytes:
        data = bytes(self._data[self._num_taken - self._start :])
        self._num_taken = self._num_put
        return data

    def end_delta(self) -> int:
        """Let a delta end here; return the bytes that this costs."""
        self._ends.append(self._num_put)
        return self._ends.itemsize

    def rewind(self, index: int) -> None:
        self._num_taken = self._ends[index]

    def forget(self, num_deltas: int) -> int:
        """Forget the first deltas; return how many bytes that frees."""
        del self._ends[:num_deltas]
        num_bytes = self._ends[0] - self._start
        del self._data[:num_bytes]
        self._start = self._ends[0]
        return num_bytes + num_deltas * self._ends.itemsize


def _encoded(
    text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> tuple[bytes, bytes, bytes]:
    """Return each kind of output as bytes that can be joined."""
    ids = array("i", token_ids).tobytes() if token_ids else b""
    return text.encode(), ids, _encoded_logprobs(logprobs)


def _encoded_logprobs(logprobs: Sequence[TokenLogprob]) -> bytes:
    return b"".join(msgspec.json.encode(entry) + b"," for entry in logprobs) if logprobs else b""


def _decoded(seq: int, text: bytes, token_ids: bytes, logprobs: bytes) -> NumberedOutput:
    ids = array("i")
    ids.frombytes(token_ids)
    return seq, text.decode(), ids.tolist(), _decoded_logprobs(logprobs)


def _decoded_logprobs(logprobs: bytes) -> list[TokenLogprob]:
    if not logprobs:
        return []
    return msgspec.json.decode(b"[" + logprobs[:-1] + b"]", type=list[TokenLogprob])
