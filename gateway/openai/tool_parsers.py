"""The parts of an answer, told apart while it comes: reasoning, text, and calls of tools.

A reader is a generator that is sent one character at a time and gives what it understands to a
`PartSink`. Because it never sees where the text was cut into pieces, its result cannot depend on
that. Nothing is held back except what may yet turn out to be a marker, the white space before one,
and a call whose name is not known yet.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "AnswerParser",
    "CallArguments",
    "CallStart",
    "CharSource",
    "EndOfText",
    "Part",
    "PartSink",
    "PlainAnswer",
    "Reader",
    "ReasoningText",
    "ReplyText",
    "read_plain",
    "read_text",
]

MAX_REWOUND = 16_384  # characters of one answer that are read again, all together

type Reader[T] = Generator[None, str, T]


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of the thoughts that come before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReplyText:
    """More of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool is called; calls are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments; all of them joined are JSON, if the model wrote JSON."""

    index: int
    text: str


type Part = ReasoningText | ReplyText | CallStart | CallArguments


class EndOfText(Exception):  # an event, not a fault
    """Raised inside a reader where it waits for a character that will not come."""


class CharSource:
    """The characters of an answer, one by one, for readers that look ahead and go back."""

    def __init__(self) -> None:
        self._ahead: deque[str] = deque()  # read, but not taken
        self._record: list[str] = []
        self._num_rewound = 0

    def peek(self) -> Reader[str]:
        """Return the next character without taking it."""
        if not self._ahead:
            self._ahead.append((yield))
        return self._ahead[0]

    def take(self) -> Reader[str]:
        """Return the next character."""
        char = yield from self.peek()
        self._ahead.popleft()
        self._record.append(char)
        return char

    def skip_space(self) -> Reader[None]:
        while (yield from self.peek()).isspace():
            yield from self.take()

    def unread(self, text: str) -> None:
        """Put characters back that were taken."""
        self._ahead.extendleft(reversed(text))

    def start_record(self) -> None:
        """Remember what is taken from here on."""
        self._record.clear()

    def rewind(self) -> bool:
        """Put back all that was recorded, unless so much was rewound before that it is too much.

        Else an answer full of what looks like the beginning of something would be read again from
        each of these beginnings.
        """
        self._num_rewound += len(self._record)
        if self._num_rewound > MAX_REWOUND:
            return False
        self._ahead.extendleft(reversed(self._record))
        return True

    @property
    def record(self) -> str:
        return "".join(self._record)


class PartSink:
    """Collects parts; neighbours of the same kind become one.

    Args:
        max_calls: calls beyond so many are dropped, and text after them; None keeps all.
    """

    def __init__(self, max_calls: int | None = None) -> None:
        self._max_calls = max_calls
        self._parts: list[Part] = []  # but for the last one, while it may grow
        self._kind: Literal["reasoning", "reply", "arguments"] | None = None  # of that one
        self._pieces: list[str] = []
        self.num_calls = 0

    @property
    def _is_full(self) -> bool:
        return self._max_calls is not None and self.num_calls > self._max_calls

    def reasoning(self, text: str) -> None:
        if self._kind != "reasoning":
            self._end_part()
            self._kind = "reasoning"
        self._pieces.append(text)

    def reply(self, text: str) -> None:
        if self._max_calls is not None and self.num_calls >= self._max_calls:
            return
        if self._kind != "reply":
            self._end_part()
            self._kind = "reply"
        self._pieces.append(text)

    def call(self, name: str) -> None:
        """Begin the next call."""
        self._end_part()
        self.num_calls += 1
        if not self._is_full:
            self._parts.append(CallStart(self.num_calls - 1, name))

    def arguments(self, text: str) -> None:
        """Add to the arguments of the last call."""
        if self._is_full:
            return
        if self._kind != "arguments":
            self._end_part()
            self._kind = "arguments"
        self._pieces.append(text)

    def take(self) -> list[Part]:
        """Return what has come since the last time."""
        self._end_part()
        parts, self._parts = self._parts, []
        return parts

    def _end_part(self) -> None:
        text = "".join(self._pieces)
        match self._kind:
            case "reasoning":
                self._parts.append(ReasoningText(text))
            case "reply":
                self._parts.append(ReplyText(text))
            case "arguments":
                self._parts.append(CallArguments(self.num_calls - 1, text))
        self._kind = None
        self._pieces.clear()


class AnswerParser:
    """Runs one reader over the text of one answer.

    Args:
        reader: makes the generator.
        max_calls: as in PartSink.
    """

    def __init__(
        self,
        reader: Callable[[CharSource, PartSink], Reader[None]],
        *,
        max_calls: int | None = None,
    ) -> None:
        self._sink = PartSink(max_calls)
        self._running = reader(CharSource(), self._sink)
        self._ended = False
        self._resume(None)

    @property
    def num_calls(self) -> int:
        """Calls begun so far, those that were dropped included."""
        return self._sink.num_calls

    def push(self, text: str) -> list[Part]:
        """Return what this text completes."""
        for char in text:
            self._resume(char)
        return self._sink.take()

    def finish(self) -> list[Part]:
        """Return what was held back; the text ends here."""
        if not self._ended:
            self._ended = True
            try:
                self._running.throw(EndOfText())
            except StopIteration:
                pass
            except EndOfText as end:
                # White space at the end belongs to an answer of text, and is nothing beside calls.
                if any(end.args) and not self._sink.num_calls:
                    self._sink.reply(end.args[0])
            else:
                raise AssertionError("a reader reads on after the end of the text")
        return self._sink.take()

    def _resume(self, char: str | None) -> None:
        if self._ended:
            return
        try:
            if char is None:
                next(self._running)
            else:
                self._running.send(char)
        except StopIteration:
            self._ended = True


class PlainAnswer:
    """In place of a parser: all is text."""

    num_calls = 0

    def push(self, text: str) -> list[Part]:
        return [ReplyText(text)] if text else []

    def finish(self) -> list[Part]:
        return []


def read_plain(source: CharSource, sink: PartSink) -> Reader[None]:
    """Take everything for text."""
    while True:
        sink.reply((yield from source.take()))


def read_text(
    source: CharSource, give: Callable[[str], None], markers: Sequence[str]
) -> Reader[tuple[str, str]]:
    """Give text away until one of the markers comes.

    Returns:
        The marker, and the white space right before it, which is not given away.

    Raises:
        EndOfText: once everything has been given away except white space at the end; its only
            argument is that white space.
    """
    space = ""
    tail = ""  # what may be the beginning of a marker
    try:
        while True:
            char = yield from source.take()
            if not tail and char.isspace():
                space += char
                continue
            tail += char
            if tail in markers:
                return tail, space
            while tail and not any(marker.startswith(tail) for marker in markers):
                give(space + tail[0])
                rest = tail[1:].lstrip()
                space, tail = tail[1 : len(tail) - len(rest)], rest
    except EndOfText:
        if tail:
            give(space + tail)
            space = ""
        raise EndOfText(space) from None
