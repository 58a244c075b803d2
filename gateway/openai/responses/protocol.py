"""Bodies of the Responses API: what we read, and what we answer.

As everywhere, optional fields accept null, unknown ones are ignored, and known ones that ask for
what we cannot do are refused by name.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from gateway.generation import Timing
from gateway.openai.protocol import SamplingBody
from gateway.openai.unsupported import COMMON_FIELDS
from gateway.token_fields import StructuralTag

__all__ = [
    "RESPONSE_FIELDS",
    "CallItem",
    "DeletedResponse",
    "Event",
    "IncompleteDetails",
    "InputItem",
    "InputPart",
    "InputTokensDetails",
    "ItemStatus",
    "MessageItem",
    "OutputItem",
    "OutputText",
    "OutputTokensDetails",
    "ReasoningItem",
    "ReasoningOptions",
    "ReasoningPart",
    "ResponseError",
    "ResponseEvent",
    "ResponseObject",
    "ResponseStatus",
    "ResponseTool",
    "ResponseToolChoice",
    "ResponseUsage",
    "ResponsesBody",
    "TextFormat",
    "TextOptions",
]

ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
type Event = dict[str, object]

# Field -> values that ask for nothing, as in `gateway.openai.unsupported`.
RESPONSE_FIELDS: Mapping[str, tuple[object, ...]] = {
    **COMMON_FIELDS,
    "conversation": (),
    "moderation": (),
    "n": (1,),
    "prompt": (),
    "prompt_logprobs": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


class InputPart(msgspec.Struct, frozen=True):
    """One part of the content of an item; only text is supported."""

    type: str
    text: str | None = None


class InputItem(msgspec.Struct, frozen=True, kw_only=True):
    """One item of the input: a message, a call, its output, or thoughts; `type` says which."""

    type: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None


class ResponseTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool; only functions are supported."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class ResponseToolChoice(msgspec.Struct, frozen=True):
    """The one tool that must be called."""

    type: str
    name: str | None = None


class TextFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the text must match: anything ("text"), or as in ResponseFormat."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, object] | None = None
    strict: bool | None = None
    structures: list[StructuralTag] | None = None
    triggers: list[str] | None = None


class TextOptions(msgspec.Struct, frozen=True):
    """What the text must be like."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, frozen=True):
    """How much the model is to think: an effort of "none" asks it not to, others do nothing."""

    effort: str | None = None
    summary: str | None = None


class ResponsesBody(SamplingBody, frozen=True, kw_only=True):
    """Body of POST /v1/responses, and of `response.create` on the websocket.

    Attributes:
        generate: on the websocket only; false computes the prompt and answers nothing.
        stream_id: on the websocket only; the lane.
    """

    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    generate: bool | None = None
    stream_id: str | None = None


class OutputText(msgspec.Struct, frozen=True, kw_only=True):
    """Text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[str] = msgspec.field(default_factory=list)
    logprobs: list[str] = msgspec.field(default_factory=list)


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """What the model says."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: tuple[OutputText, ...]


class ReasoningPart(msgspec.Struct, frozen=True, kw_only=True):
    """Text of thoughts."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thinks before it says or does something."""

    id: str
    status: ItemStatus
    summary: list[str] = msgspec.field(default_factory=list)
    content: tuple[ReasoningPart, ...]


class CallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function; the arguments are what the model wrote."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


type OutputItem = MessageItem | ReasoningItem | CallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    """Of the input tokens, those that came from the prefix cache; writing to it costs nothing."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Of the output tokens, those of thoughts."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response is shorter than the model wanted; at a dead end no token is allowed."""

    reason: Literal["max_output_tokens", "deadline", "dead_end"]


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """A response, finished or not. `timing` is ours, and null until it ends."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: tuple[MessageItem | ReasoningItem | CallItem, ...]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningOptions
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: str | ResponseToolChoice
    tools: tuple[ResponseTool, ...]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    timing: Timing | None = None


class ResponseEvent(msgspec.Struct, frozen=True):
    """What all events of a stream have; `type` says what else there is."""

    type: str
    sequence_number: int


class DeletedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response that is no more."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
