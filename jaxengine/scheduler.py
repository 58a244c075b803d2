"""Who runs in the next step, and how many tokens each gets.

Decided anew before every step, on the host, without the device. The rule is vLLM's: there is no
prefill and no decode phase, each request's `num_computed_tokens` catches up with `num_tokens`
under the budgets of the step. Chunked prefill, decode, prefix hits and recomputation after a
preemption are all that one rule.

Who goes first does not change by waiting, so nothing is ever sorted again: a request's rank is its
arrival, put off by `priority_aging_s` for each step of priority. A request of low priority is
overtaken only by those that come within a bounded time after it, and nothing starves. Between
tenants, the one that has had the least service comes first (see `tenants`).
"""

from collections.abc import Sequence
from functools import partial

from jaxengine.batching import ClosedBatch
from jaxengine.config import EngineConfig
from jaxengine.expiry import ExpiryQueue
from jaxengine.kv_cache_manager import KVCacheManager
from jaxengine.outputs import FinishReason, RequestOutput
from jaxengine.paused import PausedRequests
from jaxengine.preemption import goes_first, may_displace, pick_displaced, pick_victim
from jaxengine.prompt_budget import PromptBudget
from jaxengine.request import Request, RequestStatus
from jaxengine.scheduler_output import SchedulerOutput
from jaxengine.speculation import Speculation
from jaxengine.step_draft import StepDraft
from jaxengine.step_time import StepTimeModel
from jaxengine.tenants import TenantLedger
from jaxengine.waiting_queue import WaitingQueue

__all__ = ["Scheduler"]


class Scheduler:
    """Queues, budgets, and the life of requests.

    Owns: all requests and, through the KVCacheManager, their blocks.
    Never: touches the device or reads a clock; times come in as arguments.

    Args:
        step_times: needed for `target_itl_s`.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCacheManager,
        *,
        eos_token_ids: Sequence[int],
        step_times: StepTimeModel | None = None,
    ) -> None:
        self._config = config
        self._kv = kv
        self._eos_token_ids = frozenset(eos_token_ids)
        self._prompt_budget = PromptBudget(config, step_times)
        self._batch = None if config.batching == "continuous" else ClosedBatch(config, kv)
        self.speculation = Speculation(config, kv, step_times)
        self.tenants = TenantLedger(config.tenant_weights)
        self._fair_rows = partial(self.tenants.share, amount=config.max_num_seqs)
        self._requests: dict[str, Request] = {}
        self._running: dict[str, Request] = {}  # in order of admission
        self._waiting = WaitingQueue()
        self._paused = PausedRequests(kv, self._waiting)
        self._expiry = ExpiryQueue()
        self._free_rows = list(range(config.max_num_seqs))
        # A head that found too few blocks, and how many were free and requests known then.
        self._blocked: tuple[Request, int, int] | None = None
        self.num_received = 0
        self.tokens_received = 0
        self.num_admitted = 0
        self.tokens_admitted = 0
        self.num_preempted = 0  # among those that wait now
        self.num_preemptions = 0
        self.generation_tokens = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that waiting requests have to compute, as far as is known."""
        return self._waiting.num_tokens

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request."""
        config = self._config
        self._requests[request.request_id] = request
        self.num_received += 1
        self.tokens_received += request.num_prompt_tokens
        head = self._waiting.head()
        request.account = self.tenants.arrive(
            request.tenant if config.scheduling_policy == "fair" else "",
            first_waiting=None if head is None else head.account,
        )
        if config.scheduling_policy == "fcfs":
            request.priority = 0
        put_off_s = request.priority * config.priority_aging_s
        request.rank = (request.arrival_time_s + put_off_s, self.num_received)
        request.set_limits(eos_token_ids=self._eos_token_ids, max_model_len=config.max_model_len)
        self._waiting.push(request)
        self._expiry.add(request)
        if self._batch is not None:
            self._batch.note_arrival(request.arrival_time_s)

    def expire(self, now_s: float) -> list[RequestOutput]:
        """End the requests whose time is up."""
        return [
            self._end(request, reason, now_s) for request, reason in self._expiry.pop_due(now_s)
        ]

    def next_event_s(self, now_s: float) -> float | None:
        """Return when `expire` or `schedule` may next have something to do; None if never."""
        if self._running or (self._batch is None and self._waiting):
            return now_s
        if self._batch is None or not self._waiting:
            return None
        opens_at_s = self._batch.opens_at_s(self._waiting)
        expires_s = self._expiry.next_s()
        return opens_at_s if expires_s is None else min(opens_at_s, expires_s)

    def schedule(self, now_s: float) -> SchedulerOutput:
        """Choose the requests of the next step and count their tokens as computed.

        Running requests that decode come first, a token each, in order of admission. What is
        left of the budgets goes to prompts: those begun, and waiting ones, which join while rows
        and blocks above the watermark remain. When blocks run out, requests are preempted, and
        nobody joins in that step.
        """
        draft = StepDraft(self._config.scheduled_tokens_limit)
        preemptions_before = self.num_preemptions
        if self._batch is None:
            prompts = self._schedule_decodes(draft)
            may_join = self.num_preemptions == preemptions_before
            self._schedule_prompts(draft, prompts, now_s, may_join=may_join)
        else:
            self._schedule_batch(draft, self._batch, now_s)
        for request in draft.filled:  # those preempted since then have no computed tokens
            self._kv.remember(request, request.num_computed_tokens)
        self.speculation.add_drafts(draft)
        return draft.output(num_preempted=self.num_preemptions - preemptions_before)

    def update(
        self, output: SchedulerOutput, sampled: Sequence[int], now_s: float
    ) -> list[RequestOutput]:
        """Take in the tokens of a finished step.

        Args:
            output: the step.
            sampled: one token per item of it; ignored where nothing was sampled.
            now_s: when the tokens arrived.
        """
        outputs = []
        further = self.speculation.further_tokens(output, sampled)
        for item, token_id in zip(output.scheduled, sampled, strict=True):
            request = item.request
            # A request that ended meanwhile had one surplus token in flight: dropped here.
            if item.samples and not item.is_draft and request.status is not RequestStatus.FINISHED:
                reason = request.append(token_id, now_s)
                new: tuple[int, ...] = () if reason is FinishReason.DEAD_END else (token_id,)
                if reason is None and request.num_draft_tokens:
                    more, reason = self.speculation.settle(item, further.get(request, ()), now_s)
                    new = (token_id, *more)
                self.generation_tokens += len(new)
                if reason is None:
                    outputs.append(request.output(now_s, new))
                else:
                    outputs.append(self._end(request, reason, now_s, new_token_ids=new))
        return outputs

    def abort(self, request_id: str, now_s: float) -> RequestOutput | None:
        """End a request early. Returns its last output, or None if it has ended already."""
        request = self._requests.get(request_id)
        return None if request is None else self._end(request, FinishReason.ABORT, now_s)

    def abort_all(self, now_s: float) -> list[RequestOutput]:
        """End every request early."""
        return [self._end(r, FinishReason.ABORT, now_s) for r in list(self._requests.values())]

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
            request.num_pending_tokens = request.num_draft_tokens = 0
        for request in list(self._running.values()):
            self._preempt(request)
        if self._batch is not None:
            self._batch.disband()
        self._paused.clear()
        self._kv.reset_prefix_cache()
        return outputs

    def check_integrity(self) -> None:
        """Raise AssertionError unless requests, rows and blocks are all accounted for."""
        self._kv.check_integrity()
        rows = [*(request.row for request in self._running.values()), *self._free_rows]
        assert len(rows) == len(set(rows)) == self._config.max_num_seqs, "a lost or doubled row"
        waiting = list(self._waiting)
        queued = {request.request_id for request in waiting} | self._running.keys()
        assert queued == self._requests.keys(), "a request is in no queue"
        assert len(queued) == len(self._running) + len(waiting), "a request is queued twice"
        assert all(bool(r.block_ids) == (r in self._paused) for r in waiting), "lost blocks"
        assert len(waiting) == self.num_waiting, "waiting requests are counted wrongly"
        assert sum(request.num_waiting_tokens for request in waiting) == self.num_waiting_tokens
        preempted = sum(request.status is RequestStatus.PREEMPTED for request in waiting)
        assert preempted == self.num_preempted, "preempted requests are counted wrongly"
        assert self._requests or self._kv.num_free_blocks == self._kv.num_blocks, "idle with blocks"

    # One step.

    def _schedule_decodes(self, draft: StepDraft) -> list[Request]:
        """Give a token to each running request that needs just one.

        Returns:
            Those that need more: prompts, and what a preemption lost.
        """
        running = list(self._running.values())
        sitting_out = self.speculation.sitting_out(running, is_crowded=bool(self._waiting))
        prompts = []
        block_size = self._config.block_size
        for request in running:
            num_pending = request.num_pending_tokens
            num_tokens = len(request.token_ids) + num_pending
            num_new = num_tokens - request.num_computed_tokens
            if num_new > 1:
                prompts.append(request)
                continue
            # A pending token that is certainly the last one need not be computed.
            if num_new == 0 or (num_pending and num_tokens >= request.max_num_tokens):
                continue
            if (
                draft.budget > 0
                and not (num_pending and request.needs_last_token)  # joins the step after next
                and request not in sitting_out
                and request.status is RequestStatus.RUNNING  # not preempted just now
                and (num_tokens <= request.num_slots or self._make_room(draft, request, num_tokens))
            ):
                if num_tokens % block_size == 0:
                    draft.filled.append(request)
                elif num_tokens % block_size <= self._kv.max_pending_tokens:  # maybe known by now
                    self._kv.remember(request, num_tokens)
                draft.take_token(request)
        return [request for request in prompts if request.status is RequestStatus.RUNNING]

    def _schedule_prompts(
        self, draft: StepDraft, prompts: list[Request], now_s: float, *, may_join: bool
    ) -> None:
        """Give the rest of the budgets to prompts begun and, if they may join, to waiting ones."""
        is_alone = len(self._requests) == 1
        while draft.budget > 0 and (prompts or may_join):
            if not self._prompt_budget.most_tokens(
                draft, first_position=0, at_most=draft.budget, is_alone=is_alone
            ):
                break
            prompts = [r for r in prompts if r.status is RequestStatus.RUNNING]
            partial = min(prompts, key=lambda r: (r.account.service, r.rank), default=None)
            head = self._waiting.head() if may_join else None
            if head is not None and (partial is None or goes_first(head, partial)):
                draft.waiting_for = self._admit(draft, head, now_s)
                if draft.waiting_for:
                    may_join = False
                    continue
                request = head
            elif partial is not None:
                request = partial
                prompts.remove(request)  # once a step
            else:
                break
            first = request.num_computed_tokens
            num_left = request.num_tokens - first
            num_new = self._prompt_budget.most_tokens(
                draft, first_position=first, at_most=num_left, is_alone=is_alone
            )
            self._kv.remember(request, first + max(num_new, 1))
            draft.take(request, max(num_new, 1))  # it has joined
        if not draft.waiting_for:  # nobody may join in a step that preempted
            draft.waiting_for = "tokens" if may_join else "kv_cache"
        if not self._waiting:
            draft.waiting_for = ""

    def _schedule_batch(self, draft: StepDraft, batch: ClosedBatch, now_s: float) -> None:
        """Start a closed batch if it is time, and compute its prompts or a token of each row."""
        if not self._running and self._waiting and now_s >= batch.opens_at_s(self._waiting):
            while (head := self._waiting.head()) is not None and batch.has_room(head):
                self._start(head, batch.add(head), now_s)
            batch.reserve()
        if batch.is_prefilling:
            self._schedule_prompts(draft, batch.prompts, now_s, may_join=False)
            batch.pad_prompts(draft)
        else:
            self._schedule_decodes(draft)
            batch.fill_ended_rows(draft)
        if self._waiting:
            draft.waiting_for = "batch"

    # Joining and leaving.

    def _admit(self, draft: StepDraft, request: Request, now_s: float) -> str:
        """Give the head of the queue a row, its cached prefix, and blocks, if all of it fits.

        The whole request must fit, not only its first chunk: half a prompt in the cache helps
        nobody. The watermark does not count when nothing runs, so that progress is certain.

        Returns:
            What it lacks, as in StepRecord.waiting_for; "" if it runs now.
        """
        if request.num_pending_tokens:
            return "preemption"  # it was in flight; its token arrives with the next update
        state = (request, self._kv.num_free_blocks, self.num_received)
        if self._running and self._blocked == state:
            return "kv_cache"  # as in the step before; matching the prefix again costs time
        if not (self._free_rows or self._may_displace(request)):
            return "seqs"
        num_tokens = request.num_tokens
        is_paused = request in self._paused
        num_cached = request.num_computed_tokens if is_paused else self._kv.match_prefix(request)
        spare = self._config.watermark_blocks if self._running else 0
        wanted = self._kv.blocks_needed(request, num_tokens) + spare
        lacking = self._paused.lacking_blocks(wanted, for_request=request)
        if lacking > 0 or not self._free_rows:
            self._displace(draft, request, lacking)
            lacking = self._paused.lacking_blocks(wanted, for_request=request)
        if lacking > 0 or not self._free_rows:
            if not is_paused:
                self._kv.free(request)
            if self._free_rows:
                self._blocked = (request, self._kv.num_free_blocks, self.num_received)
            return "kv_cache" if self._free_rows else "seqs"
        self._paused.make_room(wanted, for_request=request)
        reserved = self._kv.reserve(request, num_tokens)
        assert reserved, "admission checked that the whole request fits"
        self._start(request, num_cached, now_s)
        return ""

    def _start(self, request: Request, num_cached: int, now_s: float) -> None:
        self._waiting.pop(request)
        self._paused.discard(request)
        self._blocked = None
        self.num_preempted -= request.status is RequestStatus.PREEMPTED
        if request.first_scheduled_time_s is None:
            request.begin(now_s, num_cached)
            self._kv.count_prefix_lookup(request.num_prompt_tokens, num_cached)
            self.num_admitted += 1
            self.tokens_admitted += request.num_prompt_tokens
        request.num_computed_tokens = num_cached
        request.status = RequestStatus.RUNNING
        request.row = self._free_rows.pop()
        request.account.num_running += 1
        self._running[request.request_id] = request

    def _displace(self, draft: StepDraft, request: Request, lacking_blocks: int) -> None:
        """Preempt running requests for a waiting one that should go first, if that helps."""
        if not self._may_displace(request):
            return
        for victim in pick_displaced(
            request,
            self._running.values(),
            fair_rows=self._fair_rows,
            num_holders=self._kv.num_holders,
            lacks_row=not self._free_rows,
            lacking_blocks=lacking_blocks,
            kept=draft.prompts,
        ):
            draft.drop(victim)
            self._preempt(victim, keeps_blocks=lacking_blocks <= 0)

    def _may_displace(self, request: Request) -> bool:
        """Whether some running request might have to make room for a waiting one."""
        return (
            self._config.scheduling_policy != "fcfs"
            and bool(self._running)
            and may_displace(request, self._running.values(), fair_rows=self._fair_rows)
        )

    def _make_room(self, draft: StepDraft, request: Request, num_tokens: int) -> bool:
        """Reserve blocks for a running request, preempting others as long as needed."""
        self._paused.make_room(self._kv.blocks_needed(request, num_tokens), for_request=request)
        while not self._kv.reserve(request, num_tokens):
            victim = pick_victim(self._running.values())
            draft.drop(victim)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request, *, keeps_blocks: bool = False) -> None:
        """Take a running request's row, and its blocks or not; it waits again, at its rank."""
        self._leave_running(request)
        request.status = RequestStatus.PREEMPTED
        if keeps_blocks:
            self._paused.add(request)
        else:
            self._kv.free(request)
            request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.num_preempted += 1
        self._waiting.push(request)

    def _leave_running(self, request: Request) -> None:
        del self._running[request.request_id]
        request.account.num_running -= 1
        assert request.row is not None, f"{request} runs without a row"
        self._free_rows.append(request.row)
        request.row = None

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        now_s: float,
        *,
        new_token_ids: tuple[int, ...] = (),
        error: str | None = None,
    ) -> RequestOutput:
        """End a request, whatever its status, and take back all that it holds."""
        status = request.status
        if status is RequestStatus.RUNNING:
            self._leave_running(request)
        if self._batch is None or status is not RequestStatus.RUNNING:
            self._kv.free(request)
        elif not self._running:
            self._batch.disband()
        self._paused.discard(request)
        self.tenants.leave(request.account)
        del self._requests[request.request_id]
        request.finish(reason)
        if status is not RequestStatus.RUNNING:
            self._waiting.forget(request)
            self.num_preempted -= status is RequestStatus.PREEMPTED
        return request.output(now_s, new_token_ids, error=error)
