"""One request from text to text: limits, template, tokens, engine, detokenizer, stop strings.

Everything that speaks a wire format (OpenAI HTTP, SSE, the native websocket) decodes into a
`GenerationRequest` and reads `TextDelta`s; nothing below this module knows a wire format.
"""

# INTERFACE, agreed between the authors of the gateway's parts; bodies follow.

from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from gateway.text_codec import ChatMessage
from jaxengine.sampling_params import SamplingParams
from jaxengine.token_engine import TokenEngine

__all__ = [
    "ChatMessage",
    "FinishReason",
    "GenerationRequest",
    "PreparedGeneration",
    "TextDelta",
    "TextFinish",
    "TextGenerator",
    "TextStream",
    "Timing",
    "Usage",
]

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """What a client asked for, whatever the wire format.

    Attributes:
        prompt: text, token ids, or chat messages.
        max_tokens: None means as many as the context leaves room for.
        stop: stop strings; the text before the first one that appears is the answer.
        Others: as in SamplingParams.
    """

    prompt: str | tuple[int, ...] | tuple[ChatMessage, ...]
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    cache_salt: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedGeneration:
    """A request that passed every check, with its prompt as token ids."""

    request: GenerationRequest
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds, as in jaxengine.outputs.RequestTiming, plus inter-token latencies.

    ITL values are None when fewer than two tokens were generated.
    """

    queue_s: float
    prefill_s: float
    decode_s: float
    ttft_s: float | None
    e2e_s: float
    itl_mean_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    itl_max_s: float | None
    num_preemptions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFinish:
    """How a generation ended.

    Attributes:
        stop_reason: the stop string or stop token id that ended it; None for EOS and the rest.
        error: one line for the client when reason is "error".
    """

    reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    timing: Timing
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDelta:
    """New text since the last delta; the last one carries `finish` (its text may be empty)."""

    text: str
    token_ids: tuple[int, ...]
    finish: TextFinish | None = None


class TextStream:
    """Deltas of one generation: ``async with generator.start(p) as s: async for delta in s``.

    Leaving the block early aborts the request. Exactly one delta carries `finish`, and it is the last.
    Joined texts equal the decoded answer, cut before the first stop string.
    """

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    def __aiter__(self) -> AsyncIterator[TextDelta]: ...
    async def __anext__(self) -> TextDelta: ...

    def cancel(self) -> None:
        """End the generation: the iteration then yields what is left and a finish "cancelled" with usage so far.

        Idempotent; does nothing after the end.
        """


class TextGenerator:
    """Turns `GenerationRequest`s into `TextStream`s on one engine and one tokenizer."""

    # __init__(self, engine: TokenEngine, tokenizer: Tokenizer, chat_template: ChatTemplate | None,
    #          *, metrics: Metrics, max_tokenize_chars...: see gateway/config.py)

    engine: TokenEngine

    async def prepare(self, request: GenerationRequest) -> PreparedGeneration:
        """Check the limits, render the template, and tokenize, off the event loop.

        Raises:
            gateway.errors.InvalidRequest: with `param` naming the field (status 400).
        """

    def start(self, prepared: PreparedGeneration) -> TextStream:
        """Submit to the engine at once.

        Raises:
            gateway.errors.GatewayError: Overloaded (429, retry_after_s), Unavailable (503), InvalidRequest.
        """
