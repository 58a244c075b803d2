"""Calls whose arguments are written between tags, each by itself, and not as one JSON object.

The client wants JSON all the same, so a value is what the tool's schema says: text is quoted while
it comes, anything else is passed on once it is complete, if it is JSON.
"""

import json
import re
from collections.abc import Mapping

from gateway.openai.tool_parsers import CharSource, PartSink, Reader, read_text
from gateway.openai.tool_parsers_json import NotACall, read_call

__all__ = ["ToolSchemas", "read_glm_call", "read_qwen_call"]

START, END = "<tool_call>", "</tool_call>"
NAME = re.compile(r"[\w.-]{1,64}")
MAX_TAG = 256  # characters of a name
CONSTANTS = {"True": "true", "False": "false", "None": "null"}  # as models trained on Python write

# The schema of each tool's arguments, by the tool's name.
type ToolSchemas = Mapping[str, Mapping[str, object]]


def read_qwen_call(source: CharSource, sink: PartSink, tools: ToolSchemas) -> Reader[None]:
    """Read ``<function=NAME>``, ``<parameter=KEY>`` VALUE ``</parameter>`` …, ``</function>``.

    JSON in its place is read as well; models of this family write it where they were told to.

    Raises:
        NotACall: it begins with something else.
        EndOfText: the text ended first.
    """
    yield from source.skip_space()
    if (yield from source.peek()) == "{":
        yield from read_call(source, sink)
        yield from _read_end(source)
        return
    for char in "<function=":
        if (yield from source.peek()) != char:
            raise NotACall
        yield from source.take()
    name = yield from _read_until(source, ">")
    if not NAME.fullmatch(name):
        raise NotACall
    arguments = _Arguments(sink, name, tools)
    markers = ["<parameter=", "</function>", END]
    while (marker := (yield from read_text(source, _ignore, markers))[0]) == "<parameter=":
        key = yield from _read_until(source, ">")
        if (yield from source.peek()) == "\n":
            yield from source.take()
        yield from arguments.read(source, key.strip(), end="</parameter>", is_padded=True)
    arguments.end()
    if marker != END:
        yield from _read_end(source)


def read_glm_call(source: CharSource, sink: PartSink, tools: ToolSchemas) -> Reader[None]:
    """Read NAME, ``<arg_key>KEY</arg_key>``, ``<arg_value>VALUE</arg_value>`` …, ``</tool_call>``.

    Raises:
        NotACall: it begins with something else.
        EndOfText: the text ended first.
    """
    yield from source.skip_space()
    name = ""
    while (yield from source.peek()) not in "<\n":
        name += yield from source.take()
        if len(name) > MAX_TAG:
            raise NotACall
    name = name.rstrip()
    if not NAME.fullmatch(name):
        raise NotACall
    arguments = _Arguments(sink, name, tools)
    while (yield from read_text(source, _ignore, ["<arg_key>", END]))[0] == "<arg_key>":
        pieces: list[str] = []
        yield from read_text(source, pieces.append, ["</arg_key>"])
        yield from read_text(source, _ignore, ["<arg_value>"])
        yield from arguments.read(source, "".join(pieces).strip(), end="</arg_value>")
    arguments.end()


class _Arguments:
    """The arguments of one call, written as JSON while they come."""

    def __init__(self, sink: PartSink, name: str, tools: ToolSchemas) -> None:
        self._sink = sink
        self._schema = tools.get(name, {})
        self._keys: set[str] = set()
        sink.call(name)

    def read(
        self, source: CharSource, key: str, *, end: str, is_padded: bool = False
    ) -> Reader[None]:
        """Read a value up to its closing tag, before which there may be a line end."""
        if key in self._keys:  # the first one counts: it is on its way already
            yield from read_text(source, _ignore, [end])
            return
        self._sink.arguments(", " if self._keys else "{")
        self._keys.add(key)
        self._sink.arguments(f"{_quoted(key)}: ")
        if _may_be_text(self._schema, key):
            self._sink.arguments('"')
            _, space = yield from read_text(source, self._give_text, [end])
            self._give_text(space.removesuffix("\n") if is_padded else space)
            self._sink.arguments('"')
        else:
            pieces: list[str] = []
            yield from read_text(source, pieces.append, [end])
            self._sink.arguments(_as_json("".join(pieces).strip()))

    def end(self) -> None:
        self._sink.arguments("}" if self._keys else "{}")

    def _give_text(self, text: str) -> None:
        if text:
            self._sink.arguments(_quoted(text)[1:-1])


def _read_end(source: CharSource) -> Reader[None]:
    """Read to the end of a call, or to the next one if that is missing."""
    marker, _ = yield from read_text(source, _ignore, [END, START])
    if marker == START:
        source.unread(marker)


def _ignore(_text: str) -> None:
    """What stands between the tags is for nobody."""


def _read_until(source: CharSource, end: str) -> Reader[str]:
    text = ""
    while len(text) <= MAX_TAG and (char := (yield from source.take())) != end:
        text += char
    return text


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _may_be_text(schema: Mapping[str, object], key: str) -> bool:
    """Whether a value may be text; it also may where its schema does not say."""
    properties = schema.get("properties")
    wanted = properties.get(key) if isinstance(properties, dict) else None
    if not isinstance(wanted, dict):
        return True
    options = [wanted, *(o for name in ("anyOf", "oneOf") for o in _dicts(wanted.get(name)))]
    types = [t for o in options for t in _types(o.get("type"))]
    return not types or "string" in types


def _dicts(value: object) -> list[dict[str, object]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _types(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _as_json(text: str) -> str:
    """The value as JSON: as it is written, if it is any, else as text."""
    text = CONSTANTS.get(text, text)
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _quoted(text)
    return text


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
