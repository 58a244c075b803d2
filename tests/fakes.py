"""A token engine whose every answer can be computed by hand."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from byte_tokenizer import (
    BOS,
    EOS,
    FIRST_WORD,
    IM_START,
    ByteChatTemplate,
    ByteTokenizer,
    byte_tokenizer,
)
from jaxengine.errors import (
    EngineDeadError,
    EngineStoppingError,
    InvalidRequestError,
    QueueFullError,
)
from jaxengine.output_stream import OutputStream
from jaxengine.outputs import FinishReason, RequestOutput, RequestTiming, TokenLogprobs
from jaxengine.sampling_params import SamplingParams
from jaxengine.stats import EngineStats
from jaxengine.step_log import StepLog
from jaxengine.token_engine import EngineLimits, TokenRequest

__all__ = [
    "BOS",
    "EOS",
    "IM_START",
    "STEP_S",
    "ByteChatTemplate",
    "ByteTokenizer",
    "FakeEngine",
    "byte_tokenizer",
    "fake_answer",
    "fake_logprobs",
]

STEP_S = 0.01  # what one step takes on the engine's own clock


def fake_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """Return what FakeEngine says about a token: -id/1000, and those after it, each 1 less likely.

    A token that is not the likeliest: the alternatives begin with the next one.
    """
    top = tuple((token_id + 1 + k, -token_id / 1000 + 0.5 - k) for k in range(num_top))
    return TokenLogprobs(-token_id / 1000, top)


def fake_answer(num_prompt_tokens: int, num_tokens: int) -> str:
    """Return the text that FakeEngine generates when no script says otherwise."""
    return "".join(chr(ord("a") + (num_prompt_tokens + i) % 26) for i in range(num_tokens))


@dataclass(eq=False)
class _FakeRequest:
    """One request inside the fake."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    script: tuple[int, ...] | None
    stream: OutputStream
    arrived_s: float
    scheduled_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)

    def next_token(self) -> int:
        index = len(self.token_times_s)
        if self.script is None:
            return ord("a") + (len(self.prompt) + index) % 26
        return self.script[index] if index < len(self.script) else EOS


class FakeEngine:
    """A TokenEngine without model, thread or jax: it steps on the event loop.

    Answers: token i (from 0) of the answer to a prompt of P tokens is the letter
    ``'a' + (P + i) % 26``, so the prompt "Hi!" (3 bytes) is answered by "defg…" without end,
    until `max_tokens`. A script replaces this: `script(prompt, ids)` for one prompt,
    `script_all(ids)` for every prompt; after the last scripted id comes EOS.

    Steps: each step gives one token to each of the first `max_num_seqs` requests, in order of
    arrival. Steps run by themselves, one per turn of the event loop, unless the gate is shut:
    after `hold()` only `step(n)` makes progress, until `release()`.

    Time: `clock()` starts at 100.0 and moves by STEP_S in each step, before its tokens appear.

    Attributes:
        submitted: (prompt, params) of every request so far.
        requests: the same as they were asked for.
        steps: a log to which tests add records.
        num_aborts: requests that were left before their end.
        num_cached_tokens, num_preemptions: reported for every request.
        full_for: tenants for which the queue is full.
        tenant_weights: as they were set last.
    """

    def __init__(
        self,
        *,
        max_model_len: int = 1024,
        max_num_seqs: int = 64,
        max_num_queued_requests: int = 64,
        vocab_size: int = FIRST_WORD,
    ) -> None:
        self.limits = EngineLimits(
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            max_num_seqs=max_num_seqs,
            max_num_queued_requests=max_num_queued_requests,
            eos_token_ids=(EOS,),
        )
        self.is_ready = True
        self.is_stalled = False
        self.failure: str | None = None
        self.submitted: list[tuple[tuple[int, ...], SamplingParams]] = []
        self.requests: list[TokenRequest] = []
        self.steps = StepLog(64)
        self.num_aborts = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.full_for: set[str] = set()
        self.tenant_weights: dict[str, float] = {}
        self.num_steps = 0
        self.generation_tokens = 0
        self._requests: dict[str, _FakeRequest] = {}
        self._scripts: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._default_script: tuple[int, ...] | None = None
        self._refusal: QueueFullError | None = None
        self._held = False
        self._step_is_due = False
        self._stopping = False
        self._changed = asyncio.Event()

    # What TokenEngine asks for.

    def check_capacity(self, num_requests: int, *, tenant: str = "") -> None:
        is_full = self.num_waiting + num_requests > self.limits.max_num_queued_requests
        if is_full or tenant in self.full_for:
            raise QueueFullError("too many requests wait", retry_after_s=3.0)

    def set_tenant_weights(self, weights: Mapping[str, float]) -> None:
        self.tenant_weights = dict(weights)

    def submit(self, requests: Sequence[TokenRequest]) -> list[OutputStream]:
        if self.failure is not None:
            raise EngineDeadError(f"the engine has failed: {self.failure}")
        if self._stopping or not self.is_ready:
            raise EngineStoppingError("the engine accepts no requests")
        if not all(request.prompt_token_ids for request in requests):
            raise InvalidRequestError("the prompt is empty", field="prompt")
        self.check_capacity(len(requests), tenant=requests[0].tenant)
        if self._refusal is not None:
            raise self._refusal
        streams = [self._accept(request) for request in requests]
        self._changed.set()
        self._plan_step()
        return streams

    def _accept(self, request: TokenRequest) -> OutputStream:
        request_id = f"r{len(self.submitted)}"
        prompt = tuple(request.prompt_token_ids)
        self.submitted.append((prompt, request.params))
        self.requests.append(request)
        stream = OutputStream(request_id, self._abort)
        self._requests[request_id] = _FakeRequest(
            request_id=request_id,
            prompt=prompt,
            params=request.params,
            script=self._scripts.get(prompt, self._default_script),
            stream=stream,
            arrived_s=self.clock(),
        )
        return stream

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._requests) - self.num_waiting,
            num_waiting=self.num_waiting,
            num_blocks=100,
            num_free_blocks=100 - len(self._requests),
            block_size=16,
            prompt_tokens=sum(len(prompt) for prompt, _ in self.submitted),
            generation_tokens=self.generation_tokens,
            num_steps=self.num_steps,
        )

    async def stop(self, *, drain_timeout_s: float) -> None:
        self.is_ready = False
        self._stopping = True
        self._changed.set()
        try:
            async with asyncio.timeout(drain_timeout_s):
                await self.wait_until(lambda: not self._requests)
        except TimeoutError:
            for request in list(self._requests.values()):
                self._end(request, FinishReason.ABORT)

    # What tests use.

    @property
    def num_active(self) -> int:
        """Requests that have neither ended nor been aborted."""
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        return sum(request.scheduled_s is None for request in self._requests.values())

    def clock(self) -> float:
        return 100.0 + self.num_steps * STEP_S

    def script(self, prompt: str | Sequence[int], answer: str | Sequence[int]) -> None:
        """Answer this prompt with these ids (text stands for its bytes), then EOS."""
        self._scripts[_ids(prompt)] = _ids(answer)

    def script_all(self, answer: str | Sequence[int]) -> None:
        """Answer every prompt that has no script of its own with these ids, then EOS."""
        self._default_script = _ids(answer)

    def refuse(self, reason: str, *, retry_after_s: float) -> None:
        """Let `submit` refuse everything from now on, as a full queue would."""
        self._refusal = QueueFullError(
            "the queue is full", retry_after_s=retry_after_s, reason=reason
        )

    def hold(self) -> None:
        self._held = True

    def release(self) -> None:
        self._held = False
        self._plan_step()

    def step(self, n: int = 1) -> None:
        """Run steps now, whatever the gate says."""
        for _ in range(n):
            self._step()

    async def wait_until(self, condition) -> None:
        """Wait until the condition holds; it is looked at after each event in the engine."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def wait_for_requests(self, n: int) -> None:
        """Wait until so many requests have been submitted, counted from the beginning."""
        await self.wait_until(lambda: len(self.submitted) >= n)

    async def wait_until_idle(self) -> None:
        await self.wait_until(lambda: not self._requests)

    def fail_requests(self, error: str = "the step failed") -> None:
        """End every request with an error; the engine lives on."""
        for request in list(self._requests.values()):
            self._end(request, FinishReason.ERROR, error=error)

    def end_all(self, reason: FinishReason) -> None:
        """End every request so, with what it has."""
        for request in list(self._requests.values()):
            self._end(request, reason)

    def expire(self, reason: FinishReason) -> None:
        """End by time what an engine would: QUEUE_TIMEOUT waiting requests, DEADLINE all."""
        assert reason in (FinishReason.QUEUE_TIMEOUT, FinishReason.DEADLINE)
        for request in list(self._requests.values()):
            if reason is FinishReason.DEADLINE or request.scheduled_s is None:
                self._end(request, reason)

    def die(self, error: str = "the device is gone") -> None:
        self.failure = error
        self.is_ready = False
        self._changed.set()
        self.fail_requests("the engine has failed")

    # Inside.

    def _plan_step(self) -> None:
        if self._requests and not self._held and not self._step_is_due:
            self._step_is_due = True
            asyncio.get_running_loop().call_soon(self._planned_step)

    def _planned_step(self) -> None:
        self._step_is_due = False
        if not self._held:
            self._step()
            self._plan_step()

    def _step(self) -> None:
        self.num_steps += 1
        for request in list(self._requests.values())[: self.limits.max_num_seqs]:
            if request.scheduled_s is None:
                request.scheduled_s = self.clock() - STEP_S
            token = request.next_token()
            request.token_times_s.append(self.clock())
            self.generation_tokens += 1
            stops = token in request.params.stop_token_ids
            ends = stops or (token == EOS and not request.params.ignore_eos)
            if ends and len(request.token_times_s) > request.params.min_tokens:
                self._end(request, FinishReason.STOP, token)
            elif len(request.token_times_s) >= request.params.max_tokens:
                self._end(request, FinishReason.LENGTH, token)
            else:
                request.stream.put(self._output(request, (token,)))
        self._changed.set()

    def _output(
        self,
        request: _FakeRequest,
        new_token_ids: tuple[int, ...],
        reason: FinishReason | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        times = request.token_times_s
        now = self.clock()
        scheduled = now if request.scheduled_s is None else request.scheduled_s
        timing = RequestTiming(
            queue_s=scheduled - request.arrived_s,
            prefill_s=times[0] - scheduled if times else 0.0,
            decode_s=times[-1] - times[0] if times else 0.0,
            ttft_s=times[0] - request.arrived_s if times else None,
            e2e_s=now - request.arrived_s,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
        )
        return RequestOutput(
            request_id=request.request_id,
            new_token_ids=new_token_ids,
            new_token_times_s=tuple(times[len(times) - len(new_token_ids) :]),
            num_cached_tokens=self.num_cached_tokens,
            queue_s=timing.queue_s,
            num_preemptions=self.num_preemptions,
            finish_reason=reason,
            stop_token_id=new_token_ids[-1] if reason is FinishReason.STOP else None,
            error=error,
            timing=timing if reason is not None else None,
            new_logprobs=self._logprobs(new_token_ids, request.params.logprobs),
            prompt_logprobs=self._prompt_logprobs(request),
        )

    def _logprobs(self, token_ids: Sequence[int], num_top: int | None) -> tuple[TokenLogprobs, ...]:
        return () if num_top is None else tuple(fake_logprobs(i, num_top) for i in token_ids)

    def _prompt_logprobs(self, request: _FakeRequest) -> tuple[TokenLogprobs | None, ...] | None:
        """Tell those of the prompt with the first token."""
        num_top = request.params.prompt_logprobs
        if num_top is None or len(request.token_times_s) != 1:
            return None
        return (None, *self._logprobs(request.prompt[1:], num_top))

    def _end(
        self,
        request: _FakeRequest,
        reason: FinishReason,
        *last_tokens: int,
        error: str | None = None,
    ) -> None:
        del self._requests[request.request_id]
        request.stream.put(self._output(request, last_tokens, reason, error))
        self._changed.set()

    def _abort(self, request_id: str) -> None:
        if self._requests.pop(request_id, None) is not None:
            self.num_aborts += 1
            self._changed.set()


def _ids(text_or_ids: str | Sequence[int]) -> tuple[int, ...]:
    return tuple(text_or_ids.encode() if isinstance(text_or_ids, str) else text_or_ids)
