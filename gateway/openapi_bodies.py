"""What answers hold that handlers put together by hand, as types for the OpenAPI document.

Requests, and answers that have a type already, are described by that type.
"""

from typing import Literal

import msgspec

from gateway.errors import WireError
from gateway.openai.protocol import ChatChoice, ChatDeltaChoice, CompletionChoice, Envelope

__all__ = [
    "ChatCompletion",
    "ChatCompletionChunk",
    "ErrorBody",
    "HealthBody",
    "ReadyBody",
    "StepsBody",
    "TextCompletion",
    "TicketBody",
    "VersionBody",
]


class ErrorBody(msgspec.Struct, frozen=True):
    """Every refusal and failure."""

    error: WireError


class HealthBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether the process should live on."""

    status: Literal["ok", "not_ready", "stalled", "dead"]
    reason: str | None = None


class ReadyBody(msgspec.Struct, frozen=True):
    """Whether requests are accepted."""

    status: Literal["ready", "not_ready", "stalled", "dead"]


class VersionBody(msgspec.Struct, frozen=True):
    """What runs here."""

    version: str


class TicketBody(msgspec.Struct, frozen=True):
    """Good once, for one websocket handshake, as its query parameter `ticket`."""

    ticket: str
    expires_in_s: float


class TextCompletion(Envelope, kw_only=True, frozen=True):
    """A completion; in a stream, each chunk of it."""

    object: Literal["text_completion"]
    choices: tuple[CompletionChoice, ...]


class ChatCompletion(Envelope, kw_only=True, frozen=True):
    """A whole chat answer."""

    object: Literal["chat.completion"]
    choices: tuple[ChatChoice, ...]


class ChatCompletionChunk(Envelope, kw_only=True, frozen=True):
    """One event of a streamed chat answer."""

    object: Literal["chat.completion.chunk"]
    choices: tuple[ChatDeltaChoice, ...]


class StepsBody(msgspec.Struct, frozen=True, kw_only=True):
    """Records of steps; docs/protocol.md describes their fields."""

    steps: list[dict[str, object]]
    last_index: int
    next_after: int
    num_missed: int
    now_s: float
    now_unix_s: float
