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
    messages: list[ChatMessage] = []
    for part in parts:
        before = messages[-1] if messages else None
        if before is None or not before.role == part.role == "assistant" or _begins(part, before):
            messages.append(part)
            continue
        messages[-1] = replace(
            before,
            content=before.content + part.content,
            tool_calls=(*before.tool_calls, *part.tool_calls),
        )
    return tuple(messages)


def _begins(part: ChatMessage, before: ChatMessage) -> bool:
    """Whether this part of an assistant's turn cannot belong to what is before it."""
    if part.reasoning is not None:
        return True
    return bool(part.content) and bool(before.content or before.tool_calls)


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
