"""Items of the Responses API to chat messages, and back."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gateway.errors import InvalidRequest
from gateway.openai.responses.protocol import (
    CallItem,
    InputItem,
    InputPart,
    MessageItem,
    OutputItem,
    ReasoningItem,
)
from gateway.text_codec import ChatMessage, MessageCall

__all__ = ["input_messages", "output_messages"]

ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}
TEXT_PARTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})


def input_messages(items: str | Sequence[InputItem]) -> tuple[ChatMessage, ...]:
    """Return the messages that these items stand for.

    Raises:
        InvalidRequest: an item that we cannot serve; `param` is its path.
    """
    if isinstance(items, str):
        return (ChatMessage(role="user", content=items),)
    return _joined(_message(item, f"input[{i}]") for i, item in enumerate(items))


def output_messages(items: Iterable[OutputItem]) -> tuple[ChatMessage, ...]:
    """Return the messages that an answer adds to its conversation."""
    return _joined(_answer(item) for item in items)


def _joined(parts: Iterable[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Make one message of the thoughts, the text and the calls of one turn of the assistant."""
    turns: list[list[ChatMessage]] = []
    is_silent = True  # whether the last turn has neither text nor calls
    for part in parts:
        continues = (
            bool(turns)
            and turns[-1][0].role == part.role == "assistant"
            # Thoughts begin a turn, and text comes before all calls and once.
            and part.reasoning is None
            and (is_silent or not part.content)
        )
        if continues:
            turns[-1].append(part)
        else:
            turns.append([part])
            is_silent = True
        is_silent = is_silent and not part.content and not part.tool_calls
    return tuple(_turn(turn) for turn in turns)


def _turn(parts: Sequence[ChatMessage]) -> ChatMessage:
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        content="".join(part.content for part in parts),
        tool_calls=tuple(call for part in parts for call in part.tool_calls),
    )


def _message(item: InputItem, path: str) -> ChatMessage:
    match item.type:
        case None | "message":
            if item.role not in ROLES:
                raise InvalidRequest(
                    f"{path}.role must be one of {', '.join(ROLES)}", param=f"{path}.role"
                )
            content = _text(item.content, f"{path}.content")
            return ChatMessage(role=ROLES[item.role], content=content)
        case "function_call":
            name = _required(item.name, f"{path}.name")
            call_id = _required(item.call_id, f"{path}.call_id")
            call = MessageCall(id=call_id, name=name, arguments=item.arguments or "")
            return ChatMessage(role="assistant", content="", tool_calls=(call,))
        case "function_call_output":
            return ChatMessage(
                role="tool",
                content=_text(item.output, f"{path}.output"),
                tool_call_id=_required(item.call_id, f"{path}.call_id"),
            )
        case "reasoning":
            parts = item.content or item.summary or ""
            thoughts = _text(parts, f"{path}.content")
            return ChatMessage(role="assistant", content="", reasoning=thoughts)
        case other:
            raise InvalidRequest(
                f"{path}.type: items of type '{other[:40]}' are not supported",
                param=f"{path}.type",
                code="unsupported_parameter",
            )


def _answer(item: OutputItem) -> ChatMessage:
    match item:
        case MessageItem():
            text = "".join(part.text for part in item.content)
            return ChatMessage(role="assistant", content=text)
        case ReasoningItem():
            thoughts = "".join(part.text for part in item.content)
            return ChatMessage(role="assistant", content="", reasoning=thoughts)
        case CallItem():
            call = MessageCall(id=item.call_id, name=item.name, arguments=item.arguments)
            return ChatMessage(role="assistant", content="", tool_calls=(call,))


def _required(value: str | None, path: str) -> str:
    if not value:
        raise InvalidRequest(f"{path} is required", param=path)
    return value


def _text(content: str | Sequence[InputPart] | None, path: str) -> str:
    if content is None:
        raise InvalidRequest(f"{path} is required", param=path)
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if part.type == "refusal":
            continue
        if part.type not in TEXT_PARTS:
            raise InvalidRequest(
                f"{path}[{i}].type: content of type '{part.type[:40]}' is not supported",
                param=f"{path}[{i}].type",
                code="unsupported_parameter",
            )
        if part.text is None:
            raise InvalidRequest(f"{path}[{i}].text is required", param=f"{path}[{i}].text")
        texts.append(part.text)
    return "\n".join(texts)
