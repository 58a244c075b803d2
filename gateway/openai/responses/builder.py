"""One response while it grows: parts of the answer in, events out.

Pure: no clock, no socket, no engine. Every event has its place in one sequence, and what an event
tells of an item or of the response is a snapshot that nothing changes later.
"""

import uuid
from collections.abc import Sequence
from typing import Literal

import msgspec

from gateway.errors import GatewayError
from gateway.generation import TextFinish
from gateway.openai.responses.protocol import (
    CallItem,
    Event,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningPart,
    ResponseError,
    ResponseObject,
    ResponseUsage,
)
from gateway.openai.tool_parsers import (
    CallArguments,
    CallStart,
    Part,
    ReasoningText,
    ReplyText,
)

__all__ = ["ResponseBuilder"]

type Kind = Literal["message", "reasoning", "call"]


class ResponseBuilder:
    """Builds the events of one response.

    Args:
        response: as it is at its beginning.
    """

    def __init__(self, response: ResponseObject) -> None:
        self.response = response
        self._next_number = 0
        self._open: _OpenItem | None = None

    def start(self) -> list[Event]:
        """The response has been accepted."""
        return [self._told("response.created"), self._told("response.in_progress")]

    def add(self, parts: Sequence[Part], *, call_ids: Sequence[str]) -> list[Event]:
        """The answer has grown.

        Args:
            parts: what is new.
            call_ids: an id for each call that begins in these parts.
        """
        events: list[Event] = []
        ids = iter(call_ids)
        for part in parts:
            match part:
                case ReplyText():
                    events += self._text("message", part.text)
                case ReasoningText():
                    events += self._text("reasoning", part.text)
                case CallStart():
                    events += self._close("completed")
                    events += self._begin(_OpenItem("call", name=part.name, call_id=next(ids)))
                case CallArguments():
                    events += self._grow(part.text)
        return events

    def finish(
        self, finish: TextFinish, *, reasoning_tokens: int, may_be_empty: bool = False
    ) -> list[Event]:
        """The generation has ended, and not by a failure.

        Args:
            finish: how.
            reasoning_tokens: of its tokens, those of thoughts.
            may_be_empty: an answer of no words has no item; else it has one without words.
        """
        status: Literal["completed", "incomplete", "cancelled"] = "completed"
        details: IncompleteDetails | None = None
        match finish.reason:
            case "length":
                is_dead_end = finish.stop_reason == "dead_end"
                why: Literal["dead_end", "max_output_tokens"] = (
                    "dead_end" if is_dead_end else "max_output_tokens"
                )
                status, details = "incomplete", IncompleteDetails(why)
            case "deadline":
                status, details = "incomplete", IncompleteDetails("deadline")
            case "cancelled":
                status = "cancelled"
        events = [*self._close("completed" if status == "completed" else "incomplete")]
        if status == "completed" and not self.response.output and not may_be_empty:
            events += self._begin(_OpenItem("message"))
            events += self._close("completed")
        usage = finish.usage
        self.response = msgspec.structs.replace(
            self.response,
            status=status,
            incomplete_details=details,
            usage=ResponseUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=InputTokensDetails(usage.cached_tokens),
                output_tokens=usage.completion_tokens,
                output_tokens_details=OutputTokensDetails(reasoning_tokens),
                total_tokens=usage.prompt_tokens + usage.completion_tokens,
            ),
            timing=finish.timing,
        )
        return [*events, self._told(f"response.{status}")]

    def fail(self, error: GatewayError) -> list[Event]:
        """It has failed; what there is of the answer stays, unfinished."""
        events = self._close("incomplete")
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self.response = msgspec.structs.replace(
            self.response, status="failed", error=ResponseError(code, error.message)
        )
        return [*events, self._told("response.failed")]

    def _told(self, kind: str) -> Event:
        return self._event(kind, response=self.response)

    def _event(self, kind: str, **fields: object) -> Event:
        number = self._next_number
        self._next_number += 1
        return {"type": kind, "sequence_number": number, **fields}

    def _text(self, kind: Kind, text: str) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open.kind != kind:
            events += self._close("completed")
            events += self._begin(_OpenItem(kind))
        return events + self._grow(text)

    def _begin(self, item: "_OpenItem") -> list[Event]:
        self._open = item
        index = len(self.response.output)
        added = self._event("response.output_item.added", output_index=index, item=item.begun())
        if item.kind == "call":
            return [added]
        return [added, self._of_part("response.content_part.added", item, part=item.part(""))]

    def _grow(self, text: str) -> list[Event]:
        item = self._open
        if item is None:
            return []
        item.texts.append(text)
        match item.kind:
            case "call":
                return [self._of_item("response.function_call_arguments.delta", item, delta=text)]
            case "reasoning":
                return [self._of_part("response.reasoning_text.delta", item, delta=text)]
            case "message":
                return [self._of_part("response.output_text.delta", item, delta=text, logprobs=())]

    def _close(self, status: ItemStatus) -> list[Event]:
        item = self._open
        if item is None:
            return []
        self._open = None
        text = "".join(item.texts)
        events: list[Event] = []
        match item.kind:
            case "call":
                events.append(
                    self._of_item(
                        "response.function_call_arguments.done",
                        item,
                        name=item.name,
                        arguments=text,
                    )
                )
            case "reasoning":
                events.append(self._of_part("response.reasoning_text.done", item, text=text))
            case "message":
                events.append(
                    self._of_part("response.output_text.done", item, text=text, logprobs=())
                )
        if item.kind != "call":
            events.append(self._of_part("response.content_part.done", item, part=item.part(text)))
        done = item.ended(text, status)
        events.append(
            self._event(
                "response.output_item.done", output_index=len(self.response.output), item=done
            )
        )
        self.response = msgspec.structs.replace(self.response, output=(*self.response.output, done))
        return events

    def _of_item(self, kind: str, item: "_OpenItem", **fields: object) -> Event:
        index = len(self.response.output)
        return self._event(kind, item_id=item.id, output_index=index, **fields)

    def _of_part(self, kind: str, item: "_OpenItem", **fields: object) -> Event:
        return self._of_item(kind, item, content_index=0, **fields)


class _OpenItem:
    """The item at the end of the output, while it grows."""

    def __init__(self, kind: Kind, *, name: str = "", call_id: str = "") -> None:
        prefix = {"message": "msg", "reasoning": "rs", "call": "fc"}[kind]
        self.kind = kind
        self.id = f"{prefix}_{uuid.uuid4().hex}"
        self.name = name
        self.call_id = call_id
        self.texts: list[str] = []

    def part(self, text: str) -> OutputText | ReasoningPart:
        return ReasoningPart(text=text) if self.kind == "reasoning" else OutputText(text=text)

    def begun(self) -> OutputItem:
        match self.kind:
            case "call":
                return self.ended("", "in_progress")
            case "reasoning":
                return ReasoningItem(id=self.id, status="in_progress", content=())
            case "message":
                return MessageItem(id=self.id, status="in_progress", content=())

    def ended(self, text: str, status: ItemStatus) -> OutputItem:
        match self.kind:
            case "call":
                return CallItem(
                    id=self.id,
                    call_id=self.call_id,
                    name=self.name,
                    arguments=text,
                    status=status,
                )
            case "reasoning":
                part = ReasoningPart(text=text)
                return ReasoningItem(id=self.id, status=status, content=(part,))
            case "message":
                return MessageItem(id=self.id, status=status, content=(OutputText(text=text),))
