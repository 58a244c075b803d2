"""What the engine hands to whoever asked: tokens, and the truth about how they came to be."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

__all__ = [
    "FinishReason",
    "ItemLogprobs",
    "RequestOutput",
    "RequestTiming",
    "TokenLogprobs",
]


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # EOS or a stop token id
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # the caller left, or the engine shut down
    ERROR = "error"  # the engine failed while serving it
    QUEUE_TIMEOUT = "queue_timeout"  # it waited too long to start
    DEADLINE = "deadline"  # its time was up, with what it had by then
    DEAD_END = "dead_end"  # its rules allow no token here, so it is cut


class TokenLogprobs(NamedTuple):
    """What the model thought of one token, before penalties, masks and temperature.

    Attributes:
        logprob: log-probability of the token.
        top: the most likely (token id, log-probability) at its place, likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class ItemLogprobs(NamedTuple):
    """Log-probabilities that one request got in one step.

    Attributes:
        sampled: of the sampled token, if it wants them.
        first_position: position of the first of the prompt tokens.
        prompt: of consecutive prompt tokens.
    """

    sampled: TokenLogprobs | None
    first_position: int
    prompt: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTiming:
    """Where the time of one finished request went, measured in the engine.

    Attributes:
        queue_s: from arrival to the first step that scheduled it.
        prefill_s: from then to the first token; 0 if there was none.
        decode_s: from the first token to the last.
        ttft_s: from arrival to the first token (queue included); None if there was none.
        e2e_s: from arrival to the end.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        num_preemptions: times it made room for another request: it lost its row, and its blocks
            too, to be computed anew, unless a row was all that was lacking.
    """

    queue_s: float
    prefill_s: float
    decode_s: float
    ttft_s: float | None
    e2e_s: float
    num_cached_tokens: int
    num_preemptions: int


class RequestOutput(NamedTuple):
    """New tokens of one request since the last output; the last one says how it ended.

    Attributes:
        new_token_ids: includes the EOS or stop token that ended the request, if one did.
        new_token_times_s: when each of them left the device, on the `time.monotonic` clock.
        num_cached_tokens: as in RequestTiming, known from the first output on.
        queue_s: as in RequestTiming, known from the first output on. The gateway needs it when it
            ends a request itself (stop string, cancel) and so never sees `timing`.
        num_preemptions: as in RequestTiming, so far.
        finish_reason: None until the last output.
        stop_token_id: the token that ended the request, if it ended by STOP.
        error: one line for the client, if it ended by ERROR.
        timing: set on the last output only.
        new_logprobs: one for each new token, or none at all if the request wants none.
        prompt_logprobs: one for each prompt token, None for the first; in one output, and only if
            the request wants them.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    new_token_times_s: tuple[float, ...]
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    timing: RequestTiming | None = None
    new_logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def merged(self, later: "RequestOutput") -> "RequestOutput":
        """Return one output that stands for this one followed by `later`."""
        return RequestOutput(
            request_id=self.request_id,
            new_token_ids=self.new_token_ids + later.new_token_ids,
            new_token_times_s=self.new_token_times_s + later.new_token_times_s,
            num_cached_tokens=later.num_cached_tokens,
            queue_s=later.queue_s,
            num_preemptions=later.num_preemptions,
            finish_reason=later.finish_reason,
            stop_token_id=later.stop_token_id,
            error=later.error,
            timing=later.timing,
            new_logprobs=self.new_logprobs + later.new_logprobs,
            prompt_logprobs=(
                later.prompt_logprobs if self.prompt_logprobs is None else self.prompt_logprobs
            ),
        )
