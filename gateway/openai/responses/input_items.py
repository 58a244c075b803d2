"""GET /v1/responses/{id}/input_items: what a response was asked, a page at a time."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.errors import InvalidRequest
from gateway.openai.responses.protocol import CallItem, ReasoningItem, ReasoningPart
from gateway.text_codec import ChatMessage

__all__ = ["InputItemList", "InputMessageItem", "InputResultItem", "InputText", "input_item_page"]

DEFAULT_LIMIT = 20
MAX_LIMIT = 100


class InputText(msgspec.Struct, frozen=True, kw_only=True):
    """Text of a message; what an assistant has said is `output_text`, with no annotations."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[str] | UnsetType = UNSET


class InputMessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A turn of the conversation."""

    id: str
    role: str
    status: Literal["completed"] = "completed"
    content: tuple[InputText, ...]


class InputResultItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"
):
    """What a function has returned."""

    id: str
    call_id: str
    output: str
    status: Literal["completed"] = "completed"


type _Item = InputMessageItem | InputResultItem | CallItem | ReasoningItem


class InputItemList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of items."""

    object: Literal["list"] = "list"
    data: tuple[InputMessageItem | InputResultItem | CallItem | ReasoningItem, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool


def input_item_page(
    response_id: str, messages: Sequence[ChatMessage], query: Mapping[str, str]
) -> InputItemList:
    """Return the items that `limit`, `order` and `after` of a query ask for.

    Args:
        response_id: of the response; the ids of its items are made of it.
        messages: what it was asked.
        query: the parameters.

    Raises:
        InvalidRequest: naming the parameter at fault.
    """
    items = [item for i, m in enumerate(messages) for item in _items(m, f"{response_id[5:]}_{i}")]
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    if order == "desc":
        items.reverse()
    limit = query.get("limit", str(DEFAULT_LIMIT))
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= MAX_LIMIT):
        raise InvalidRequest(f"limit must be from 1 to {MAX_LIMIT}", param="limit")
    if (after := query.get("after")) is not None:
        ids = [item.id for item in items]
        if after not in ids:
            raise InvalidRequest("after must be the id of one of the items", param="after")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    return InputItemList(
        data=tuple(page),
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(page) < len(items),
    )


def _items(message: ChatMessage, suffix: str) -> list[_Item]:
    """Return the items that a message was made of."""
    if message.role == "tool":
        call_id = message.tool_call_id or ""
        return [InputResultItem(id=f"fco_{suffix}", call_id=call_id, output=message.content)]
    items: list[_Item] = []
    if message.reasoning is not None:
        thoughts = (ReasoningPart(text=message.reasoning),)
        items.append(ReasoningItem(id=f"rs_{suffix}", status="completed", content=thoughts))
    if message.content or not (message.reasoning or message.tool_calls):
        said = message.role == "assistant"
        text = InputText(
            type="output_text" if said else "input_text",
            text=message.content,
            annotations=[] if said else UNSET,
        )
        items.append(InputMessageItem(id=f"msg_{suffix}", role=message.role, content=(text,)))
    items += [
        CallItem(
            id=f"fc_{suffix}_{i}",
            call_id=call.id,
            name=call.name,
            arguments=call.arguments,
            status="completed",
        )
        for i, call in enumerate(message.tool_calls)
    ]
    return items
