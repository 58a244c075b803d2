"""The engine as asyncio sees it: a thread that steps, and a stream for every request."""

import asyncio
import contextlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxengine.admission import Admission
from jaxengine.engine_core import EngineCore
from jaxengine.errors import (
    EngineDeadError,
    EngineStalledError,
    EngineStoppingError,
    InvalidRequestError,
)
from jaxengine.output_stream import OutputStream
from jaxengine.outputs import FinishReason, RequestOutput
from jaxengine.request import Request
from jaxengine.sampling_params import SamplingParams
from jaxengine.stall_watch import StallWatch, describe_steps, describe_thread
from jaxengine.stats import EngineStats
from jaxengine.step_log import StepLog, StepRecord
from jaxengine.token_engine import EngineLimits, TokenRequest

__all__ = ["AsyncEngine"]

logger = logging.getLogger(__name__)

# How often stopping looks whether the last step hangs.
JOIN_S = 1.0


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Stop:
    """End all requests and the thread."""


@dataclass(frozen=True, slots=True)
class _SetWeights:
    weights: Mapping[str, float]


_Message = Request | _Abort | _SetWeights | _Stop


class _News(NamedTuple):
    """What a step brought."""

    outputs: list[RequestOutput]
    records: list[StepRecord]
    stats: EngineStats


class AsyncEngine:
    """An EngineCore in a thread of its own; implements TokenEngine.

    The event loop posts messages into an inbox; the thread hands all new tokens of a step to the
    loop in one call. Neither touches the other's state.

    Owns: the thread and the watch over it, the inbox, the streams. Create and use it on one event
    loop.
    """

    def __init__(self, core: EngineCore, limits: EngineLimits) -> None:
        self._core = core
        self._limits = limits
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._streams: dict[str, OutputStream] = {}
        self._steps = StepLog(core.config.num_step_records)
        self._stats = core.stats()
        self._admission = Admission(core.config, self._stats)
        step_timeout_s = core.config.step_timeout_s
        self._watch = None if step_timeout_s is None else StallWatch(step_timeout_s)
        self._watch_timer: asyncio.TimerHandle | None = None
        self._accepting = False
        self._failure: str | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def is_ready(self) -> bool:
        return self._accepting and self._failure is None and not self.is_stalled

    @property
    def is_stalled(self) -> bool:
        return self._watch is not None and self._watch.is_stalled

    @property
    def failure(self) -> str | None:
        return self._failure

    @property
    def steps(self) -> StepLog:
        return self._steps

    def stats(self) -> EngineStats:
        if self._watch is None or not self._watch.num_stalls:
            return self._stats
        return replace(self._stats, num_stalls=self._watch.num_stalls)

    def start(self) -> None:
        """Start the thread and accept requests. Call it on the event loop, once."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._accepting = True
        self._plan_look()

    def submit(self, requests: Sequence[TokenRequest]) -> list[OutputStream]:
        """Queue all of these requests, or none; see TokenEngine.submit."""
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        if not self._accepting:
            raise EngineStoppingError("the engine is shutting down")
        if self.is_stalled:
            raise EngineStalledError("the engine does not get on")
        for request in requests:
            self._check(request.prompt_token_ids, request.params)
        self._admission.check(requests)
        return [self._accept(request) for request in requests]

    def check_capacity(self, num_requests: int, *, tenant: str = "") -> None:
        """Refuse before the work of tokenizing; see TokenEngine.check_capacity."""
        self._admission.check_count(num_requests, tenant)

    def set_tenant_weights(self, weights: Mapping[str, float]) -> None:
        """Change the tenants' shares; see TokenEngine.set_tenant_weights."""
        self._admission.set_tenant_weights(weights)
        self._inbox.put(_SetWeights(dict(weights)))

    def _accept(self, request: TokenRequest) -> OutputStream:
        params = request.params
        accepted = Request(
            f"req-{secrets.token_hex(12)}",
            tuple(request.prompt_token_ids),
            params,
            seed=secrets.randbits(64) if params.seed is None else params.seed % 2**64,
            arrival_time_s=time.monotonic(),
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            priority=request.priority,
            queue_timeout_s=self._admission.queue_timeout_s(request),
            deadline_s=request.deadline_s,
        )
        stream = OutputStream(accepted.request_id, self._abort)
        self._streams[accepted.request_id] = stream
        self._admission.accept(accepted.request_id, request)
        self._idle.clear()
        self._inbox.put(accepted)
        return stream

    async def stop(self, *, drain_timeout_s: float) -> None:
        """Accept nothing more, let requests finish for so long, abort the rest, end the thread.

        A thread that is stalled is left behind, after its requests got their ends.
        """
        self._accepting = False
        if not self._thread.is_alive():
            return
        try:
            async with asyncio.timeout(drain_timeout_s):
                await self._idle.wait()
        except TimeoutError:
            logger.info("draining timed out, %d requests are aborted", len(self._streams))
        self._inbox.put(_Stop())
        while self._thread.is_alive() and not self.is_stalled:
            await asyncio.to_thread(self._thread.join, JOIN_S)
        if self._thread.is_alive():
            self._deliver_failure("it stalled, and was told to stop")
        # The thread's last outputs are on their way through the loop.
        await self._idle.wait()
        if self._watch_timer is not None:
            self._watch_timer.cancel()

    def _check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        limits = self._limits
        if not prompt_token_ids:
            raise InvalidRequestError("the prompt is empty", field="prompt")
        if len(prompt_token_ids) >= limits.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {len(prompt_token_ids)} tokens, which leaves no room for an "
                f"answer in a context of {limits.max_model_len}",
                field="prompt",
                code="context_length_exceeded",
            )
        all_ids: Mapping[str, Sequence[int]] = {
            "prompt": prompt_token_ids,
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids or (),
            "logit_bias": [token_id for token_id, _ in params.logit_bias],
            "bad_words": [token_id for word in params.bad_words for token_id in word],
        }
        for field, ids in all_ids.items():
            if ids and (min(ids) < 0 or max(ids) >= limits.vocab_size):
                raise InvalidRequestError(
                    f"{field} has a token id outside the vocabulary of {limits.vocab_size}",
                    field=field,
                )

    def _abort(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._admission.end(request_id)
            self._inbox.put(_Abort(request_id))
            self._note_idle()

    def _note_idle(self) -> None:
        if not self._streams:
            self._idle.set()

    # On the event loop.
    def _plan_look(self) -> None:
        if self._watch is not None and self._loop is not None:
            self._watch_timer = self._loop.call_later(self._watch.tick_interval_s, self._look)

    def _look(self) -> None:
        """See whether the thread gets on, and say where it stands if it does not."""
        assert self._watch is not None
        self._plan_look()
        # Streams may all have been left: then the thread has not even read that.
        if self._failure is not None or not (self._streams or not self._inbox.empty()):
            self._watch.note_progress()
        elif self._watch.tick():
            logger.critical(
                "the engine is stalled: no step has ended for %g s",
                self._core.config.step_timeout_s,
                extra={
                    "fields": {
                        "steps_in_flight": describe_steps(self._core.steps_in_flight),
                        "running": self._stats.num_running,
                        "waiting": self._stats.num_waiting,
                        "engine_thread": describe_thread(self._thread),
                    }
                },
            )

    def _deliver(self, news: _News) -> None:
        if self._watch is not None and news.records:
            if self._watch.is_stalled:
                logger.warning("the engine is no longer stalled: a step has ended")
            self._watch.note_progress()
        self._steps.extend(news.records)
        self._admission.note(news.stats, time.monotonic())
        for output in news.outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # its reader left
            stream.put(output)
            if output.finished:
                del self._streams[output.request_id]
                self._admission.end(output.request_id)
        self._note_idle()

    def _deliver_failure(self, failure: str) -> None:
        """End every stream by an error: the thread is dead."""
        self._failure = failure
        for request_id, stream in self._streams.items():
            self._admission.end(request_id)
            stream.put(
                RequestOutput(
                    request_id=request_id,
                    new_token_ids=(),
                    new_token_times_s=(),
                    finish_reason=FinishReason.ERROR,
                    error="the engine has failed",
                )
            )
        self._streams.clear()
        self._idle.set()

    # In the engine thread.
    def _run(self) -> None:
        try:
            running = True
            while running:
                outputs, running = self._read_inbox()
                if running and self._core.has_work:
                    outputs += self._core.step()
                self._stats = self._core.stats()
                records = self._core.take_records()
                if outputs or records:
                    self._call(self._deliver, _News(outputs, records, self._stats))
        except Exception as error:
            logger.critical("the engine is dead", exc_info=error)
            self._stats = self._core.stats()
            self._call(self._deliver_failure, f"{type(error).__name__}: {error}")

    def _read_inbox(self) -> tuple[list[RequestOutput], bool]:
        """Take in all messages until it is time to step.

        Returns:
            Outputs of requests that ended, and whether to go on.
        """
        outputs: list[RequestOutput] = []
        while True:
            wait_s = self._core.seconds_until_work()
            if outputs and wait_s is None:
                wait_s = 0.0  # all have left; say so before waiting for others
            try:
                message = self._inbox.get(block=wait_s != 0, timeout=wait_s)
            except queue.Empty:
                if wait_s:
                    continue  # it may not be time yet: some wait in order to look at something
                return outputs, True
            match message:
                case Request():
                    self._core.add(message)
                case _Abort(request_id):
                    outputs += self._core.abort(request_id)
                case _SetWeights(weights):
                    self._core.set_tenant_weights(weights)
                case _Stop():
                    return outputs + self._core.abort_all(), False

    def _call[T](self, function: Callable[[T], None], argument: T) -> None:
        """Run a function on the event loop, unless that is gone."""
        assert self._loop is not None, "the thread runs before start()"
        # A closed loop has no readers left.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, argument)
