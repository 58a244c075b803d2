"""Messages of the stream protocol as the client sees them (docs/protocol.md is normative)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

__all__ = [
    "Accepted",
    "ChatMessage",
    "Delta",
    "Done",
    "GenerationOptions",
    "Goaway",
    "Hello",
    "Pong",
    "Resumed",
    "ServerError",
    "ServerMessage",
    "Timing",
    "TokenLogprob",
    "TopLogprob",
    "Usage",
]


class ChatMessage(TypedDict):
    """One turn of a conversation; `role` is "system", "user" or "assistant"."""

    role: str
    content: str


class GenerationOptions(TypedDict, total=False):
    """Options of a generation; what is left out, or None, takes the server's default.

    `return_token_ids` makes the deltas carry token ids, and `logprobs` how likely each token was,
    with so many alternatives (0 to 20). The others are explained in
    docs/protocol.md under `start`.
    """

    model: str | None
    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    logprobs: int | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool | None
    ignore_eos: bool | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[str, float] | None
    bad_words: Sequence[str] | None
    allowed_token_ids: Sequence[int] | None
    structured_outputs: Mapping[str, object] | None
    cache_salt: str | None
    tenant: str | None
    priority: int | None
    queue_timeout: float | None
    deadline: float | None
    return_token_ids: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Tokens of one generation; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of one generation, measured in the server.

    Attributes:
        queue_s: until the engine first worked on it.
        ttft_s: until the first token, queue included; None without a token.
        prefill_s: from queue's end to the first token.
        decode_s: from the first token to the last.
        e2e_s: from arrival to the end.
        itl_mean_s, itl_p50_s, itl_p99_s, itl_max_s: time between tokens; None without two.
        num_preemptions: how often the request gave way to another one.
    """

    queue_s: float
    ttft_s: float | None
    prefill_s: float
    decode_s: float
    e2e_s: float
    itl_mean_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    itl_max_s: float | None
    num_preemptions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """What the server says first."""

    server: str
    version: int
    model: str
    limits: Mapping[str, float]
    heartbeat_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """A stream's request is in the server's engine; without a token it cannot be resumed."""

    id: str
    request_id: str
    prompt_tokens: int
    resume_token: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """The rest of a stream from another connection comes next."""

    id: str
    request_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TopLogprob:
    """How likely a token was; `bytes` is None for one that is not text."""

    token: str
    logprob: float
    bytes: bytes | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """How likely a generated token was, and the likeliest at its place."""

    token: str
    logprob: float
    bytes: bytes | None
    top_logprobs: tuple[TopLogprob, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """New text of a stream; `token_ids` and `logprobs` are None unless asked for."""

    id: str
    seq: int
    text: str
    token_ids: tuple[int, ...] | None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """End of a stream."""

    id: str
    seq: int
    finish_reason: str
    stop_reason: str | int | None
    usage: Usage
    timing: Timing


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerError:
    """End of the stream `id`, or an answer to a frame that started none (`id` None)."""

    id: str | None
    message: str
    type: str
    param: str | None
    code: str | None
    status: int
    retry_after_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pong:
    """Answer to a ping."""

    t: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Goaway:
    """The server will close the connection."""

    reason: str
    retry_after_s: float


ServerMessage = Hello | Accepted | Resumed | Delta | Done | ServerError | Pong | Goaway
