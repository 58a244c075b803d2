"""Bodies of the OpenAI endpoints: what we read, and what we answer.

Every optional field of a request accepts null, because clients send it. Unknown fields are
ignored; known ones that we do not support yet are refused in `gateway.openai.unsupported`.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.generation import Timing

__all__ = [
    "ChatBody",
    "ChatChoice",
    "ChatDelta",
    "ChatDeltaChoice",
    "CompletionBody",
    "CompletionChoice",
    "ContentPart",
    "Envelope",
    "GeneratedMessage",
    "MessageBody",
    "PromptTokensDetails",
    "SamplingBody",
    "StreamOptions",
    "UsageBody",
    "WireFinish",
]

WireFinish = Literal["stop", "length"]


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that both generating endpoints share."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    tenant: str | None = None
    priority: int | None = None
    queue_timeout: float | None = None
    deadline: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionBody(SamplingBody, frozen=True, kw_only=True):
    """Body of POST /v1/completions. A prompt is text or token ids; several come as a list."""

    prompt: str | list[str | int | list[int]]


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content; only text is supported."""

    type: str
    text: str | None = None


class MessageBody(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[object] | None = None
    function_call: object = None


class ChatBody(SamplingBody, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[MessageBody]
    max_completion_tokens: int | None = None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Of the prompt tokens, those that came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Of the generated tokens, those that the client is not shown: none here."""

    reasoning_tokens: int = 0


class UsageBody(msgspec.Struct, frozen=True):
    """Token counts of one HTTP request, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class _Choice(msgspec.Struct, kw_only=True, frozen=True):
    """What all choices share. `stop_reason` and `timing` are ours; only finished ones have them."""

    index: int
    logprobs: None = None
    finish_reason: WireFinish | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    timing: Timing | UnsetType = UNSET


class CompletionChoice(_Choice, kw_only=True, frozen=True):
    """A choice of a text completion; whole and streamed ones look alike."""

    text: str


class ChatDelta(msgspec.Struct, kw_only=True, frozen=True):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str


class ChatDeltaChoice(_Choice, kw_only=True, frozen=True):
    """A choice of a streamed chat answer."""

    delta: ChatDelta


class GeneratedMessage(msgspec.Struct, kw_only=True, frozen=True):
    """A whole answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(_Choice, kw_only=True, frozen=True):
    """A choice of a whole chat answer."""

    message: GeneratedMessage


class Envelope(msgspec.Struct, kw_only=True, frozen=True):
    """A whole answer or one chunk of it.

    Attributes:
        usage: in a stream absent unless asked for; then null until the last chunk.
    """

    id: str
    object: str
    created: int
    model: str
    choices: tuple[CompletionChoice | ChatDeltaChoice | ChatChoice, ...]
    usage: UsageBody | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
