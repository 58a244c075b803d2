"""Who runs in the next step, and how many tokens each gets.

Decided anew before every step, on the host, without the device. The rule is vLLM's: there is no
prefill and no decode phase, each request's `num_computed_tokens` catches up with `num_tokens`
under the budgets of the step. Chunked prefill, decode, prefix hits and recomputation after a
preemption are all that one rule.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from jaxengine.config import EngineConfig
from jaxengine.kv_cache_manager import KVCacheManager
from jaxengine.outputs import FinishReason, RequestOutput
from jaxengine.request import Request, RequestStatus

__all__ = ["ScheduledRequest", "Scheduler", "SchedulerOutput"]


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step.

    Attributes:
        first_position: position of its first token in this step.
        num_new_tokens: tokens to compute.
        row: place in the device state.
        block_ids: its block table; a copy.
        samples: the step reaches the request's last token, so a new one is sampled.
        last_is_pending: the last token to compute is known to the device only.
    """

    request: Request
    first_position: int
    num_new_tokens: int
    row: int
    block_ids: tuple[int, ...]
    samples: bool
    last_is_pending: bool

    @property
    def token_ids(self) -> Sequence[int]:
        """Tokens to compute that the host knows; one short if `last_is_pending`."""
        end = self.first_position + self.num_new_tokens - self.last_is_pending
        return self.request.token_ids[self.first_position : end]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step.

    Attributes:
        num_tokens: tokens to compute, over all requests.
        num_preempted: requests that lost their blocks for it.
        wasted_slots: token slots to compute besides that hold nothing, as a static batch does.
    """

    scheduled: tuple[ScheduledRequest, ...]
    num_tokens: int
    num_preempted: int
    wasted_slots: int = 0


class Scheduler:
    """Queues, budgets, and the life of requests.

    Owns: all requests and, through the KVCacheManager, their blocks.
    Never: touches the device or reads a clock; times come in as arguments.
    """

    def __init__(
        self, config: EngineConfig, kv: KVCacheManager, *, eos_token_ids: Sequence[int]
    ) -> None:
        self._config = config
        self._kv = kv
        self._eos_token_ids = frozenset(eos_token_ids)
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []  # in order of admission
        self._waiting: deque[Request] = deque()  # preempted ones in front
        self._free_rows = list(range(config.max_num_seqs))
        self.num_preemptions = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request behind all others."""
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def schedule(self, now_s: float) -> SchedulerOutput:
        """Choose the requests of the next step and count their tokens as computed.

        Running requests come first, in order of admission; then preempted and waiting ones join
        while tokens, rows, and blocks above the watermark remain. When blocks run out, the
        request admitted last gives way, and nobody joins in that step.
        """
        budget = self._config.scheduled_tokens_limit
        scheduled: list[ScheduledRequest] = []
        preempted_before = self.num_preemptions

        for request in list(self._running):
            if budget == 0:
                break
            if request.status is not RequestStatus.RUNNING or self._awaits_its_end(request):
                continue
            num_new = min(request.num_tokens - request.num_computed_tokens, budget)
            if num_new and self._make_room(request, num_new):
                scheduled.append(self._take(request, num_new))
                budget -= num_new

        num_preempted = self.num_preemptions - preempted_before
        while self._waiting and budget > 0 and self._free_rows and num_preempted == 0:
            request = self._waiting[0]
            if not self._admit(request, now_s):
                break
            self._waiting.popleft()
            num_new = min(request.num_tokens - request.num_computed_tokens, budget)
            allocated = self._kv.allocate(request, num_new)
            assert allocated, "admission checked that the whole request fits"
            scheduled.append(self._take(request, num_new))
            budget -= num_new

        num_tokens = self._config.scheduled_tokens_limit - budget
        return SchedulerOutput(tuple(scheduled), num_tokens, num_preempted)

    def update(
        self, output: SchedulerOutput, sampled: Sequence[int], now_s: float
    ) -> list[RequestOutput]:
        """Take in the tokens of a finished step.

        Args:
            output: the step.
            sampled: one token per scheduled request; ignored where nothing was sampled.
            now_s: when the tokens arrived.
        """
        outputs = []
        for item, token_id in zip(output.scheduled, sampled, strict=True):
            # A request that ended meanwhile had one surplus token in flight: dropped here.
            if item.samples and not item.request.is_finished:
                outputs.append(self._append(item.request, token_id, now_s))
        return outputs

    def abort(self, request_id: str, now_s: float) -> RequestOutput | None:
        """End a request early. Returns its last output, or None if it has ended already."""
        request = self._requests.get(request_id)
        return None if request is None else self._end(request, FinishReason.ABORT, now_s)

    def abort_all(self, now_s: float) -> list[RequestOutput]:
        """End every request early."""
        return [
            self._end(request, FinishReason.ABORT, now_s)
            for request in list(self._requests.values())
        ]

    def fail(self, requests: Sequence[Request], message: str, now_s: float) -> list[RequestOutput]:
        """End the given requests by an error, and let all others start over.

        After a failed step the content of the device's cache is unknown: cached prefixes are
        forgotten and everyone else is recomputed.
        """
        outputs = [
            self._end(request, FinishReason.ERROR, now_s, error=message)
            for request in requests
            if not request.is_finished
        ]
        for request in self._requests.values():
            request.num_pending_tokens = 0
        for request in reversed(list(self._running)):
            self._preempt(request)
        self._kv.reset_prefix_cache()
        return outputs

    def check_integrity(self) -> None:
        """Raise AssertionError unless requests, rows and blocks are all accounted for."""
        self._kv.check_integrity()
        rows = [request.row for request in self._running]
        assert sorted([*rows, *self._free_rows], key=lambda row: -1 if row is None else row) == (
            list(range(self._config.max_num_seqs))
        ), "a row is lost or held twice"
        queued = {request.request_id for request in (*self._running, *self._waiting)}
        assert queued == set(self._requests), "a request is in no queue"
        assert len(queued) == len(self._running) + len(self._waiting), "a request is queued twice"
        if not self._requests:
            assert self._kv.num_free_blocks == self._kv.num_blocks, "idle, but blocks are held"

    def _awaits_its_end(self, request: Request) -> bool:
        """Whether the pending token is certainly the last one."""
        return request.num_pending_tokens > 0 and (
            request.num_output_tokens >= request.params.max_tokens
            or request.num_tokens >= self._config.max_model_len
        )

    def _admit(self, request: Request, now_s: float) -> bool:
        """Give a waiting request a row and its cached prefix, if all of it fits.

        The whole request must fit, not only its first chunk: half a prompt in the cache helps
        nobody. The watermark does not count when nothing runs, so that progress is certain.
        """
        if request.num_pending_tokens:
            return False  # preempted with a token in flight, which arrives with the next update
        num_cached = self._kv.match_prefix(request)
        needed = self._kv.blocks_needed(request, request.num_tokens)
        spare = self._config.watermark_blocks if self._running else 0
        if needed + spare > self._kv.num_free_blocks:
            self._kv.free(request)
            return False
        if request.first_scheduled_time_s is None:
            request.first_scheduled_time_s = now_s
            request.num_cached_tokens = num_cached
            self._kv.count_prefix_lookup(request.num_prompt_tokens, num_cached)
            self.prompt_tokens += request.num_prompt_tokens
        request.num_computed_tokens = num_cached
        request.status = RequestStatus.RUNNING
        request.row = self._free_rows.pop()
        self._running.append(request)
        return True

    def _make_room(self, request: Request, num_new_tokens: int) -> bool:
        """Allocate blocks, preempting from the end of the running list as long as needed."""
        while not self._kv.allocate(request, num_new_tokens):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _take(self, request: Request, num_new_tokens: int) -> ScheduledRequest:
        first = request.num_computed_tokens
        end = first + num_new_tokens
        assert request.row is not None, f"{request} runs without a row"
        item = ScheduledRequest(
            request=request,
            first_position=first,
            num_new_tokens=num_new_tokens,
            row=request.row,
            block_ids=tuple(self._kv.block_ids(request)),
            samples=end == request.num_tokens,
            last_is_pending=end > len(request.token_ids),
        )
        request.num_computed_tokens = end
        request.num_pending_tokens += item.samples
        return item

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks and row; it resumes before all waiting ones."""
        self._leave_running(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(request)

    def _leave_running(self, request: Request) -> None:
        self._running.remove(request)
        self._kv.free(request)
        assert request.row is not None, f"{request} runs without a row"
        self._free_rows.append(request.row)
        request.row = None

    def _append(self, request: Request, token_id: int, now_s: float) -> RequestOutput:
        request.num_pending_tokens -= 1
        request.token_ids.append(token_id)
        self.generation_tokens += 1
        if request.first_token_time_s is None:
            request.first_token_time_s = now_s
        request.last_token_time_s = now_s
        reason, stop_token_id = self._finish_reason(request, token_id)
        if reason is None:
            return RequestOutput(
                request_id=request.request_id,
                new_token_ids=(token_id,),
                new_token_times_s=(now_s,),
                queue_s=request.queue_s(now_s),
                num_cached_tokens=request.num_cached_tokens,
                num_preemptions=request.num_preemptions,
            )
        return self._end(
            request, reason, now_s, new_token_ids=(token_id,), stop_token_id=stop_token_id
        )

    def _finish_reason(
        self, request: Request, token_id: int
    ) -> tuple[FinishReason | None, int | None]:
        params = request.params
        # Only what is known counts: the next token may be in flight already.
        num_known = len(request.token_ids) - request.num_prompt_tokens
        if num_known >= params.min_tokens and (
            token_id in params.stop_token_ids
            or (not params.ignore_eos and token_id in self._eos_token_ids)
        ):
            return FinishReason.STOP, token_id
        if num_known >= params.max_tokens or len(request.token_ids) >= self._config.max_model_len:
            return FinishReason.LENGTH, None
        return None, None

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        now_s: float,
        *,
        new_token_ids: tuple[int, ...] = (),
        stop_token_id: int | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        """End a request, whatever its status, and take back all that it holds."""
        if request.status is RequestStatus.RUNNING:
            self._leave_running(request)
        else:
            self._waiting.remove(request)
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        return RequestOutput(
            request_id=request.request_id,
            new_token_ids=new_token_ids,
            new_token_times_s=(now_s,) * len(new_token_ids),
            queue_s=request.queue_s(now_s),
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            finish_reason=reason,
            stop_token_id=stop_token_id,
            error=error,
            timing=request.timing(now_s),
        )
