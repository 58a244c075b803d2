"""A call as models write it in JSON: ``{"name": ..., "arguments": {...}}``, read while it comes.

Arguments are passed on as they are written, so that a reader of the answer sees them grow; they
are never parsed and written again.
"""

import json
from collections.abc import Callable

from gateway.openai.tool_parsers import CharSource, EndOfText, PartSink, Reader

__all__ = ["NotACall", "read_call", "read_call_list", "read_value"]

NO_ARGUMENTS = "{}"
ARGUMENT_KEYS = ("arguments", "parameters")
CALL_KEYS = (*ARGUMENT_KEYS, "name", "type", "id")


class NotACall(Exception):  # what it is, not what went wrong
    """The text is no call after all, and nothing of it has been given away."""


class _BrokenJSON(Exception):
    pass


def read_call(
    source: CharSource,
    sink: PartSink,
    *,
    accepts: Callable[[str], bool] = bool,
    is_marked: bool = True,
) -> Reader[None]:
    """Read one object; after it the source stands behind its closing brace.

    An object that breaks off or is broken after its name is still a call, with the arguments that
    it has by then.

    Args:
        source: the next character should be the opening brace.
        sink: gets the call.
        accepts: whether something may be called by that name.
        is_marked: whether it can hardly be anything but a call; else it is none as soon as it has
            a field that calls do not have, so that other objects are not held back.

    Raises:
        NotACall: the object has no name, or one that is not accepted.
        EndOfText: the text ended first.
    """
    call = _Call(sink, accepts)
    try:
        yield from _expect(source, "{")
        yield from source.skip_space()
        while (yield from source.peek()) != "}":
            key = yield from _read_string(source)
            if not (is_marked or key in CALL_KEYS):
                raise _BrokenJSON
            yield from source.skip_space()
            yield from _expect(source, ":")
            yield from source.skip_space()
            yield from call.read_field(source, key)
            yield from source.skip_space()
            if (yield from source.peek()) == "}":
                break
            yield from _expect(source, ",")
            yield from source.skip_space()
        yield from source.take()
    except _BrokenJSON:
        if not call.has_begun:
            raise NotACall from None
        return
    if not call.has_begun:
        raise NotACall
    call.end()


def read_call_list(source: CharSource, sink: PartSink) -> Reader[None]:
    """Read ``[call, call, ...]``; the next character should be the opening bracket.

    Raises:
        NotACall: it begins with no call.
        EndOfText: the text ended first.
    """
    num_calls = sink.num_calls
    try:
        yield from _expect(source, "[")
        yield from source.skip_space()
        while (yield from source.peek()) != "]":
            yield from read_call(source, sink)
            yield from source.skip_space()
            if (yield from source.peek()) == "]":
                break
            yield from _expect(source, ",")
            yield from source.skip_space()
        yield from source.take()
    except (_BrokenJSON, NotACall):
        if sink.num_calls == num_calls:
            raise NotACall from None
        return
    if sink.num_calls == num_calls:
        raise NotACall


def read_value(source: CharSource, give: Callable[[str], None]) -> Reader[None]:
    """Give away the text of one JSON value; only its brackets and quotes are looked at."""
    depth = 0
    in_string = False
    while True:
        char = yield from source.peek()
        if in_string:
            yield from source.take()
            give(char)
            if char == "\\":
                give((yield from source.take()))
            elif char == '"':
                in_string = False
                if depth == 0:
                    return
            continue
        if depth == 0 and (char in ",]}" or char.isspace()):
            return  # behind a number or a word
        yield from source.take()
        give(char)
        if char == '"':
            in_string = True
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
            if depth == 0:
                return


class _Call:
    """What is known of one call."""

    def __init__(self, sink: PartSink, accepts: Callable[[str], bool]) -> None:
        self._sink = sink
        self._accepts = accepts
        self._waiting: list[str] | None = None  # arguments that came before the name
        self._has_arguments = False
        self.has_begun = False

    def read_field(self, source: CharSource, key: str) -> Reader[None]:
        if key == "name" and not self.has_begun:
            self._begin((yield from _read_string(source)))
        elif key in ARGUMENT_KEYS and not self._has_arguments and self._waiting is None:
            yield from self._read_arguments(source)
        else:
            yield from read_value(source, lambda _: None)

    def end(self) -> None:
        if not self._has_arguments:
            self._sink.arguments(NO_ARGUMENTS)

    def _begin(self, name: str) -> None:
        if not self._accepts(name):
            raise NotACall
        self.has_begun = True
        self._sink.call(name)
        if self._waiting is not None:
            self._give("".join(self._waiting))

    def _read_arguments(self, source: CharSource) -> Reader[None]:
        if self.has_begun and (yield from source.peek()) == "{":
            self._has_arguments = True
            yield from read_value(source, self._sink.arguments)
            return
        self._waiting = []
        try:
            yield from read_value(source, self._waiting.append)
        except EndOfText:
            if self.has_begun:  # what there is of them
                self._give("".join([*self._waiting, '"']))
            raise
        if self.has_begun:
            self._give("".join(self._waiting))

    def _give(self, text: str) -> None:
        """Pass on arguments that were not written as an object right behind the name."""
        self._has_arguments = True
        if text.startswith('"'):  # some models put JSON into a string
            text = _decoded(text)
        self._sink.arguments(NO_ARGUMENTS if text in ("", "null") else text)


def _decoded(text: str) -> str:
    try:
        inner = json.loads(text, strict=False)
    except ValueError:
        return text
    if isinstance(inner, str) and inner.lstrip().startswith("{") and _is_unicode(inner):
        return inner
    return text


def _expect(source: CharSource, char: str) -> Reader[None]:
    if (yield from source.peek()) != char:
        raise _BrokenJSON
    yield from source.take()


def _read_string(source: CharSource) -> Reader[str]:
    if (yield from source.peek()) != '"':
        raise _BrokenJSON
    pieces: list[str] = []
    yield from read_value(source, pieces.append)
    try:
        value = json.loads("".join(pieces), strict=False)
    except ValueError:
        raise _BrokenJSON from None
    if not (isinstance(value, str) and _is_unicode(value)):
        raise _BrokenJSON
    return value


def _is_unicode(text: str) -> bool:
    """Whether it can be sent: an escape in JSON may stand for half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
