"""The answer of one request, as text: deltas, and how it ended."""

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import msgspec

from gateway.accounts import Account
from gateway.detokenizer import Detokenizer, StopStrings
from gateway.errors import sanitize
from gateway.metrics import Metrics
from gateway.timing import TimeKeeper, Timing
from jaxengine.output_stream import OutputStream
from jaxengine.outputs import FinishReason as EngineFinish
from jaxengine.outputs import RequestOutput, RequestTiming, TokenLogprobs
from jaxengine.wakeup import Wakeup

__all__ = ["FinishReason", "TextDelta", "TextFinish", "TextStream", "Usage"]

logger = logging.getLogger(__name__)

# Why a generation ended, in the words of the native protocol. "queue_timeout" never started.
FinishReason = Literal["stop", "length", "deadline", "cancelled", "queue_timeout", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Tokens of one generation; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


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


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """New text since the last delta; the last one carries `finish` (its text may be empty).

    Attributes:
        logprobs: one for each token, or none if they are not wanted.
        prompt_logprobs: in the first delta, if they are wanted.
    """

    text: str
    token_ids: tuple[int, ...]
    finish: TextFinish | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class TextStream:
    """Deltas of one generation: ``async with generator.start(p) as s: async for delta in s``.

    Leaving the block early aborts the request. Exactly one delta carries `finish`, and it is the
    last. Joined texts equal the decoded answer, cut before the first stop string. No delta is
    empty, except that the last one may have no text. While nobody reads, deltas merge.

    Args:
        prompt_only: the one token that the engine generates is not wanted.
    """

    def __init__(
        self,
        outputs: OutputStream,
        *,
        num_prompt_tokens: int,
        detokenizer: Detokenizer,
        stops: StopStrings,
        eos_token_ids: tuple[int, ...],
        metrics: Metrics,
        account: Account | None,
        clock: Callable[[], float],
        prompt_only: bool = False,
    ) -> None:
        self._wakeup = Wakeup()
        self._outputs = outputs
        self._outputs.on_news = self._wakeup.set
        self._prompt_only = prompt_only
        self._num_prompt_tokens = num_prompt_tokens
        self._detokenizer = detokenizer
        self._stops = stops
        self._eos_token_ids = eos_token_ids
        self._metrics = metrics
        self._account = account
        self._clock = clock
        self._times = TimeKeeper(clock(), metrics.observe_inter_token_latency)
        self._num_tokens = 0
        self._num_cached_tokens = 0
        self._unsent_ids: tuple[int, ...] = ()
        self._unsent_logprobs: tuple[TokenLogprobs, ...] = ()
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._ended = False

    @property
    def request_id(self) -> str:
        """The engine's name for the request."""
        return self._outputs.request_id

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._ended:
            self._finish("cancelled")
        self._outputs.close()

    def __aiter__(self) -> AsyncIterator[TextDelta]:
        return self

    async def __anext__(self) -> TextDelta:
        """Return what is new. Cancelling is safe: no text is lost."""
        while (delta := self.take()) is None:
            if self._ended:
                raise StopAsyncIteration
            await self._wakeup.wait()
        return delta

    def notify(self, on_news: Callable[[], None]) -> None:
        """Let this be called whenever `take` may have something, in place of iterating."""
        self._outputs.on_news = on_news

    def take(self) -> TextDelta | None:
        """Return all that is new; None while there is nothing to show, and after the last delta."""
        if self._ended:
            return None
        output = self._outputs.take()
        if output is not None:
            return self._read(output)
        # Without a last output there is an end only after `cancel`.
        return self._last_delta("", "cancelled") if self._outputs.has_ended else None

    def cancel(self) -> None:
        """End the generation; what is left can be read, and then a finish "cancelled".

        Idempotent; does nothing after the end.
        """
        self._outputs.close()

    def _read(self, output: RequestOutput) -> TextDelta | None:
        """Take in what the engine has produced; None while there is nothing to show."""
        self._num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        text, num_tokens = "", 0
        for token_id in () if self._prompt_only else output.new_token_ids:
            num_tokens += 1
            if token_id == output.stop_token_id and self._is_silent(token_id):
                continue
            text += self._stops.push(self._detokenizer.push(token_id))
            if self._stops.matched is not None:
                break
        self._count(output, num_tokens)
        if self._stops.matched is not None:
            delta = self._last_delta(text, "stop", stop_reason=self._stops.matched)
            # The engine knows no stop strings: leaving is how it learns.
            self._outputs.close()
            return delta
        if output.finish_reason is not None:
            return self._end_as_engine(text, output, output.finish_reason)
        if self._outputs.has_ended:  # and this is what was there
            return self._last_delta(text, "cancelled")
        return self._delta(text, None) if text else None

    def _count(self, output: RequestOutput, num_tokens: int) -> None:
        """Add so many of these tokens to the answer."""
        self._times.add(output, num_tokens)
        self._num_tokens += num_tokens
        self._unsent_ids += output.new_token_ids[:num_tokens]
        if output.new_logprobs:
            self._unsent_logprobs += output.new_logprobs[:num_tokens]
        if self._account is not None:
            self._account.add_output(num_tokens)

    def _is_silent(self, stop_token_id: int) -> bool:
        """Whether the token that ended the answer is no part of it."""
        return not self._stops.include or stop_token_id in self._eos_token_ids

    def _end_as_engine(self, text: str, output: RequestOutput, reason: EngineFinish) -> TextDelta:
        match reason:
            case EngineFinish.STOP if not self._prompt_only:
                token_id = output.stop_token_id
                shown = None if token_id in self._eos_token_ids else token_id
                return self._last_delta(text, "stop", stop_reason=shown, timing=output.timing)
            case EngineFinish.LENGTH | EngineFinish.STOP:
                return self._last_delta(text, "length", timing=output.timing)
            case EngineFinish.DEAD_END:
                return self._last_delta(
                    text, "length", stop_reason="dead_end", timing=output.timing
                )
            case EngineFinish.DEADLINE:
                return self._last_delta(text, "deadline", timing=output.timing)
            case EngineFinish.QUEUE_TIMEOUT:
                return self._last_delta(text, "queue_timeout", timing=output.timing)
            case EngineFinish.ABORT:
                error = "the server stopped before the answer was complete"
                return self._last_delta(text, "error", timing=output.timing, error=error)
            case EngineFinish.ERROR:
                error = sanitize(output.error or "the engine failed")
                return self._last_delta(text, "error", timing=output.timing, error=error)

    def _last_delta(
        self,
        text: str,
        reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        timing: RequestTiming | None = None,
        error: str | None = None,
    ) -> TextDelta:
        """Flush what was held back (a stop string may still appear in it) and finish."""
        if self._stops.matched is None:
            text += self._stops.push(self._detokenizer.flush())
            if self._stops.matched is None:
                text += self._stops.flush()
            elif reason in ("stop", "length", "deadline"):
                reason, stop_reason = "stop", self._stops.matched
        finish = self._finish(reason, stop_reason=stop_reason, timing=timing, error=error)
        return self._delta(text, finish)

    def _finish(
        self,
        reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        timing: RequestTiming | None = None,
        error: str | None = None,
    ) -> TextFinish:
        """Mark the end and count it; called exactly once."""
        self._ended = True
        finish = TextFinish(
            reason=reason,
            stop_reason=stop_reason,
            usage=Usage(
                prompt_tokens=self._num_prompt_tokens,
                completion_tokens=self._num_tokens,
                cached_tokens=self._num_cached_tokens,
            ),
            timing=self._times.finish(self._clock(), timing),
            error=error,
        )
        self._log_end(finish)
        if self._account is not None:
            self._settle(self._account, finish)
        self._metrics.observe_request(
            "abort" if reason == "cancelled" else reason,
            prompt_tokens=finish.usage.prompt_tokens,
            completion_tokens=finish.usage.completion_tokens,
            timing=finish.timing,
        )
        return finish

    def _settle(self, account: Account, finish: TextFinish) -> None:
        """Tell the account how it ended; what never began to run costs nothing."""
        if finish.reason == "queue_timeout":
            account.end_unbegun(prompt_tokens=self._num_prompt_tokens)
            return
        account.end(
            prompt_tokens=finish.usage.prompt_tokens,
            cached_tokens=finish.usage.cached_tokens,
            timing=finish.timing,
        )

    def _log_end(self, finish: TextFinish) -> None:
        """Say who used what; never what was asked or answered."""
        fields = {
            "request_id": self.request_id,
            "key": None if self._account is None else self._account.name,
            "finish_reason": finish.reason,
            "prompt_tokens": finish.usage.prompt_tokens,
            "cached_tokens": finish.usage.cached_tokens,
            "completion_tokens": finish.usage.completion_tokens,
            "queue_s": finish.timing.queue_s,
            "ttft_s": finish.timing.ttft_s,
            "e2e_s": finish.timing.e2e_s,
        }
        logger.info("request ended", extra={"fields": fields})

    def _delta(self, text: str, finish: TextFinish | None) -> TextDelta:
        """Return all that has not been sent."""
        delta = TextDelta(
            text, self._unsent_ids, finish, self._unsent_logprobs, self._prompt_logprobs
        )
        self._unsent_ids, self._unsent_logprobs, self._prompt_logprobs = (), (), None
        return delta
