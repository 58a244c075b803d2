"""How families of models write calls of tools into their answers.

```
hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>, again for each call
llama3_json  {"name": ..., "parameters": {...}}, perhaps after <|python_tag|>, more after ";"
mistral      [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or newer,
             [TOOL_CALLS]name[ARGS]{...}, again for each call
qwen3_xml    <tool_call><function=name><parameter=key>value</parameter></function></tool_call>
glm45        <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>
```

What looks like a call and is none stays text.
"""

import re
from collections.abc import Callable, Container, Mapping
from typing import Literal, get_args

from gateway.config import ToolParserName
from gateway.openai.tool_parsers import CharSource, EndOfText, PartSink, Reader, read_text
from gateway.openai.tool_parsers_json import (
    NotACall,
    read_call,
    read_call_list,
    read_value,
)
from gateway.openai.tool_parsers_xml import ToolSchemas, read_glm_call, read_qwen_call

__all__ = [
    "VISIBLE_TOKENS",
    "ToolFormat",
    "read_answer",
    "read_forced_call",
    "read_forced_calls",
    "tool_format",
]

ToolFormat = Literal["hermes", "llama3_json", "mistral", "qwen3_xml", "glm45"]

# Special tokens that mark calls; an answer that may call tools shows them.
VISIBLE_TOKENS: Mapping[ToolFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "qwen3_xml": ("<tool_call>", "</tool_call>"),
    "glm45": (
        *("<tool_call>", "</tool_call>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
}
# What only one format of several with the same marks has in a chat template.
SIGNS: Mapping[str, ToolFormat] = {"<function=": "qwen3_xml", "<arg_key>": "glm45"}

TOOL_CALL, END_OF_TOOL_CALL = VISIBLE_TOKENS["hermes"]
[PYTHON_TAG] = VISIBLE_TOKENS["llama3_json"]
TOOL_CALLS, ARGS, CALL_ID = VISIBLE_TOKENS["mistral"]

NAME = re.compile(r"[\w.-]{1,64}")
MAX_HEAD = 256  # characters of a name with its call id


def tool_format(chosen: ToolParserName, template: str) -> ToolFormat | None:
    """Return how a model writes calls; "auto" looks for the marks in its chat template.

    None if it writes them in a way that is not known here.
    """
    if chosen != "auto":
        return chosen
    for sign, sign_of in SIGNS.items():
        if sign in template:
            return sign_of
    for name in get_args(ToolFormat):
        if VISIBLE_TOKENS[name][0] in template:
            found: ToolFormat = name
            return found
    return None


def read_answer(
    source: CharSource, sink: PartSink, *, style: ToolFormat, tools: ToolSchemas
) -> Reader[None]:
    """Read an answer that may call tools.

    Args:
        source: the answer.
        sink: gets its parts.
        style: how calls are written.
        tools: what is not marked as a call is one only if it names one of them.
    """
    if style == "llama3_json":
        yield from _read_bare_calls(source, sink, tools)
    marker = VISIBLE_TOKENS[style][0]
    while True:
        _, space = yield from read_text(source, sink.reply, [marker])
        if style == "hermes":
            reading = _read_hermes_call(source, sink)
        elif style == "llama3_json":
            reading = _read_llama3_calls(source, sink, bool)
        elif style == "qwen3_xml":
            reading = read_qwen_call(source, sink, tools)
        elif style == "glm45":
            reading = read_glm_call(source, sink, tools)
        else:
            reading = _read_mistral_calls(source, sink)
        yield from _attempt(source, sink, reading, before=space + marker)


def read_forced_call(source: CharSource, sink: PartSink, *, name: str) -> Reader[None]:
    """Read an answer that is nothing but the arguments of one tool."""
    sink.call(name)
    yield from source.skip_space()
    yield from read_value(source, sink.arguments)


def read_forced_calls(source: CharSource, sink: PartSink) -> Reader[None]:
    """Read an answer that is nothing but a list of calls."""
    if not (yield from _attempt(source, sink, _read_list(source, sink), before="")):
        yield from read_text(source, sink.reply, [])


def _read_list(source: CharSource, sink: PartSink) -> Reader[None]:
    yield from source.skip_space()
    yield from read_call_list(source, sink)


def _attempt(
    source: CharSource, sink: PartSink, reading: Reader[None], *, before: str
) -> Reader[bool]:
    """Read calls; if there are none, `before` is text, and the rest is there to be read again.

    The rest is text as well if too much of the answer was read again already.
    """
    num_calls = sink.num_calls
    source.start_record()
    try:
        yield from reading
    except NotACall:
        _give(sink, before)
        if not source.rewind():
            _give(sink, source.record)
        return False
    except EndOfText:
        if sink.num_calls == num_calls:
            _give(sink, before + source.record)
        raise
    return True


def _give(sink: PartSink, text: str) -> None:
    if text:
        sink.reply(text)


def _read_hermes_call(source: CharSource, sink: PartSink) -> Reader[None]:
    yield from source.skip_space()
    yield from read_call(source, sink)
    # Whatever is left of a broken call is for nobody.
    marker, _ = yield from read_text(source, lambda _: None, [END_OF_TOOL_CALL, TOOL_CALL])
    if marker == TOOL_CALL:
        source.unread(marker)


def _read_bare_calls(source: CharSource, sink: PartSink, names: Container[str]) -> Reader[None]:
    """Read calls that an answer begins with; if there are none, at most a brace is taken."""
    num_calls = sink.num_calls
    source.start_record()
    try:
        yield from _read_llama3_calls(source, sink, names.__contains__, is_marked=False)
    except NotACall:
        brace = source.record.find("{") + 1
        _give(sink, source.record[:brace])
        source.unread(source.record[brace:])
    except EndOfText:
        if sink.num_calls == num_calls:
            _give(sink, source.record)
        raise


def _read_llama3_calls(
    source: CharSource, sink: PartSink, accepts: Callable[[str], bool], *, is_marked: bool = True
) -> Reader[None]:
    yield from source.skip_space()
    yield from read_call(source, sink, accepts=accepts, is_marked=is_marked)
    while True:
        yield from source.skip_space()
        if (yield from source.peek()) == ";":
            yield from source.take()
            yield from source.skip_space()
        if (yield from source.peek()) != "{":
            return
        reading = read_call(source, sink, accepts=accepts, is_marked=is_marked)
        if not (yield from _attempt(source, sink, reading, before="")):
            return


def _read_mistral_calls(source: CharSource, sink: PartSink) -> Reader[None]:
    yield from source.skip_space()
    first = yield from source.peek()
    if first == "[":
        yield from read_call_list(source, sink)
    elif first == "{":
        yield from read_call(source, sink)
    else:
        head = ""
        while (yield from source.peek()) != "{" and len(head) < MAX_HEAD:
            head += yield from source.take()
        name = head.removesuffix(ARGS).partition(CALL_ID)[0].strip()
        if not NAME.fullmatch(name):
            raise NotACall
        sink.call(name)
        yield from read_value(source, sink.arguments)
