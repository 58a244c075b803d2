"""Tools in plain words, for models whose chat template has no place for them.

Definitions go into the system message, calls and results into ordinary turns, so that any template
will do and special tokens are as safe as in any other content. The calls are in the notation that
most open models know: JSON between ``<tool_call>`` and ``</tool_call>``.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from gateway.text_codec import ChatMessage, MessageCall, ToolDefinition

__all__ = ["with_tools_in_words"]

INTRODUCTION = """\
You may use these tools, described in JSON:
{definitions}
To use some, write only a call for each, in this form:
<tool_call>
{{"name": "the tool", "arguments": {{"an argument": "its value"}}}}
</tool_call>
You get their results then. If you need none, just answer."""


def with_tools_in_words(
    messages: Sequence[ChatMessage], tools: Sequence[ToolDefinition]
) -> tuple[ChatMessage, ...]:
    """Return a conversation that says the same without tools, calls and results of its own kind."""
    told: list[ChatMessage] = []
    for are_results, group in groupby(messages, key=lambda message: message.role == "tool"):
        if are_results:
            # One turn for all results: many templates want user and assistant to take turns.
            told.append(ChatMessage(role="user", content="\n".join(map(_result, group))))
        else:
            told.extend(map(_with_calls, group))
    if not tools:
        return tuple(told)
    definitions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    introduction = INTRODUCTION.format(definitions=definitions)
    if told and told[0].role in ("system", "developer"):
        content = f"{told[0].content}\n\n{introduction}".lstrip()
        return (replace(told[0], content=content), *told[1:])
    return (ChatMessage(role="system", content=introduction), *told)


def _with_calls(message: ChatMessage) -> ChatMessage:
    if not message.tool_calls:
        return message
    parts = [message.content] if message.content else []
    content = "\n".join([*parts, *(_call(call) for call in message.tool_calls)])
    return replace(message, content=content, tool_calls=())


def _call(call: MessageCall) -> str:
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {call.arguments or "{}"}}}\n</tool_call>'


def _result(message: ChatMessage) -> str:
    return f"<tool_response>\n{message.content}\n</tool_response>"
