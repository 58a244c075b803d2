"""Who is here: the requests that wait and those that run, and the rows and blocks that each holds.

The scheduler decides who gets tokens; here it is seen to that whoever is to run can, whatever that
takes from others, and that whoever ends gives everything back.
"""

from collections.abc import Collection, Sequence
from functools import partial

from jaxengine.batching import ClosedBatch
from jaxengine.config import EngineConfig
from jaxengine.kv_cache_manager import KVCacheManager
from jaxengine.outputs import FinishReason, RequestOutput
from jaxengine.paused import PausedRequests
from jaxengine.preemption import is_owed_row, may_displace, pick_displaced, pick_victim
from jaxengine.request import Request, RequestStatus
from jaxengine.running import RunningRequests
from jaxengine.step_draft import StepDraft
from jaxengine.tenants import TenantLedger
from jaxengine.waiting_queue import WaitingQueue

__all__ = ["Roster"]


class Roster:
    """All requests, from their arrival to their end.

    Owns: the requests and, through the KVCacheManager, their blocks.

    Attributes:
        waiting, running: the requests; each is in one of them.
        tenants: whom they are of.
        num_received, tokens_received: requests that came, and tokens of their prompts.
        num_admitted, tokens_admitted: those among them that have run.
        num_preempted: those among the waiting that ran before.
        num_preemptions: times that one gave way to another.

    Args:
        batch: the closed batch that they run in, if they do.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCacheManager,
        *,
        eos_token_ids: Sequence[int],
        batch: ClosedBatch | None,
    ) -> None:
        self._config = config
        self._kv = kv
        self._eos_token_ids = frozenset(eos_token_ids)
        self._batch = batch
        self.tenants = TenantLedger(config.tenant_weights)
        self._fair_rows = partial(self.tenants.share, amount=config.max_num_seqs)
        self._requests: dict[str, Request] = {}
        self.running = RunningRequests(config.max_num_seqs)
        self.waiting = WaitingQueue()
        self._paused = PausedRequests(kv, self.waiting)
        # A head that found too few blocks, and how many were free and requests known then.
        self._blocked: tuple[Request, int, int] | None = None
        self.num_received = 0
        self.tokens_received = 0
        self.num_admitted = 0
        self.tokens_admitted = 0
        self.num_preempted = 0
        self.num_preemptions = 0

    def __len__(self) -> int:
        return len(self._requests)

    def find(self, request_id: str) -> Request | None:
        """Return a request that has not ended."""
        return self._requests.get(request_id)

    def all(self) -> list[Request]:
        """Return all requests, in order of arrival."""
        return list(self._requests.values())

    def add(self, request: Request) -> None:
        """Let a request wait."""
        config = self._config
        self._requests[request.request_id] = request
        self.num_received += 1
        self.tokens_received += request.num_prompt_tokens
        head = self.waiting.head()
        request.account = self.tenants.arrive(
            request.tenant if config.scheduling_policy == "fair" else "",
            first_waiting=None if head is None else head.account,
        )
        if config.scheduling_policy == "fcfs":
            request.priority = 0
        put_off_s = request.priority * config.priority_aging_s
        request.rank = (request.arrival_time_s + put_off_s, self.num_received)
        request.set_limits(eos_token_ids=self._eos_token_ids, max_model_len=config.max_model_len)
        self.waiting.push(request)

    def is_owed_row(self, request: Request) -> bool:
        """Whether others have more rows than their tenants' fair shares, and its own has fewer."""
        return self._config.scheduling_policy == "fair" and is_owed_row(
            request, self.running, fair_rows=self._fair_rows
        )

    def has_blocks_for(self, request: Request, *, besides: int) -> bool:
        """Whether nobody has to give a block back for a request, if so many others are no use."""
        wanted = self._kv.blocks_for(request.num_tokens) + self._config.watermark_blocks
        return wanted + besides <= self._kv.num_free_blocks

    def admit(
        self,
        draft: StepDraft,
        request: Request,
        now_s: float,
        unfinished: Collection[int] = (),
    ) -> str:
        """Give the head of the queue a row, its cached prefix, and blocks, if all of it fits.

        The whole request must fit, not only its first chunk: half a prompt in the cache helps
        nobody. The watermark does not count when nothing runs, so that progress is certain.

        Args:
            draft: the step.
            request: the head.
            now_s: when.
            unfinished: blocks that steps in flight have still to write or to read, which are of no
                use before these; so many are free besides what the request needs.

        Returns:
            What it lacks, as in StepRecord.waiting_for; "" if it runs now.
        """
        if request.num_pending_tokens:
            return "preemption"  # it was in flight; its token arrives with the next update
        state = (request, self._kv.num_free_blocks, self.num_received)
        if self.running and self._blocked == state:
            return "kv_cache"  # as in the step before; matching the prefix again costs time
        if not (self.running.has_free_row or self._may_displace(request)):
            return "seqs"
        num_tokens = request.num_tokens
        is_paused = request in self._paused
        num_cached = request.num_computed_tokens
        if not is_paused:
            num_cached = self._kv.match_prefix(request, unfinished)
        spare = self._config.watermark_blocks if self.running else 0
        wanted = self._kv.blocks_needed(request, num_tokens) + spare
        lacking = self._paused.lacking_blocks(wanted, for_request=request)
        if lacking > 0 or not self.running.has_free_row:
            self._displace(draft, request, lacking)
            lacking = self._paused.lacking_blocks(wanted, for_request=request)
        if lacking > 0 or not self.running.has_free_row:
            if not is_paused:
                self._kv.free(request)
            if self.running.has_free_row:
                self._blocked = (request, self._kv.num_free_blocks, self.num_received)
            return "kv_cache" if self.running.has_free_row else "seqs"
        self._paused.make_room(wanted, for_request=request)
        reserved = self._kv.reserve(request, num_tokens, unfinished)
        assert reserved, "admission checked that the whole request fits"
        self.start(request, num_cached, now_s)
        return ""

    def start(self, request: Request, num_cached: int, now_s: float) -> None:
        self.waiting.pop(request)
        self._paused.discard(request)
        self._blocked = None
        self.num_preempted -= request.status is RequestStatus.PREEMPTED
        if request.first_scheduled_time_s is None:
            request.begin(now_s, num_cached)
            self._kv.count_prefix_lookup(request.num_prompt_tokens, num_cached)
            self.num_admitted += 1
            self.tokens_admitted += request.num_prompt_tokens
        request.num_computed_tokens = num_cached
        self.running.add(request)

    def _displace(self, draft: StepDraft, request: Request, lacking_blocks: int) -> None:
        """Preempt running requests for a waiting one that should go first, if that helps."""
        if not self._may_displace(request):
            return
        for victim in pick_displaced(
            request,
            self.running,
            fair_rows=self._fair_rows,
            num_holders=self._kv.num_holders,
            lacks_row=not self.running.has_free_row,
            lacking_blocks=lacking_blocks,
            kept=draft.prompts,
        ):
            draft.drop(victim)
            self.preempt(victim, keeps_blocks=lacking_blocks <= 0)

    def _may_displace(self, request: Request) -> bool:
        """Whether some running request might have to make room for a waiting one."""
        return (
            self._config.scheduling_policy != "fcfs"
            and bool(self.running)
            and may_displace(request, self.running, fair_rows=self._fair_rows)
        )

    def make_room(
        self,
        draft: StepDraft,
        request: Request,
        num_tokens: int,
        unfinished: Collection[int] = (),
    ) -> bool:
        """Reserve blocks for a running request, preempting others as long as needed.

        Nobody is preempted where there are blocks that it must not get; see KVCacheManager.reserve.
        """
        if unfinished:
            needed = self._kv.blocks_needed(request, num_tokens) + len(unfinished)
            return needed <= self._kv.num_free_blocks and self._kv.reserve(
                request, num_tokens, unfinished
            )
        self._paused.make_room(self._kv.blocks_needed(request, num_tokens), for_request=request)
        while not self._kv.reserve(request, num_tokens):
            victim = pick_victim(self.running)
            draft.drop(victim)
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def preempt(self, request: Request, *, keeps_blocks: bool = False) -> None:
        """Take a running request's row, and its blocks or not; it waits again, at its rank."""
        self.running.remove(request)
        request.status = RequestStatus.PREEMPTED
        if keeps_blocks:
            self._paused.add(request)
        else:
            self._kv.free(request)
            request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.num_preempted += 1
        self.waiting.push(request)

    def end(
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
            self.running.remove(request)
        if self._batch is None or status is not RequestStatus.RUNNING:
            self._kv.free(request)
        elif not self.running:
            self._batch.disband()
        self._paused.discard(request)
        self.tenants.leave(request.account)
        del self._requests[request.request_id]
        request.finish(reason)
        if status is not RequestStatus.RUNNING:
            self.waiting.forget(request)
            self.num_preempted -= status is RequestStatus.PREEMPTED
        return request.output(now_s, new_token_ids, error=error)

    def clear_prefixes(self) -> None:
        """Forget what is cached, and what the waiting hold: none of it is known any more."""
        self._paused.clear()
        self._kv.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Raise AssertionError unless requests, rows and blocks are all accounted for."""
        self._kv.check_integrity()
        self.running.check_integrity()
        waiting = list(self.waiting)
        queued = {request.request_id for request in (*waiting, *self.running)}
        assert queued == self._requests.keys(), "a request is in no queue"
        assert len(queued) == len(self.running) + len(waiting), "a request is queued twice"
        assert all(bool(r.block_ids) == (r in self._paused) for r in waiting), "lost blocks"
        assert len(waiting) == len(self.waiting), "waiting requests are counted wrongly"
        counted = self.waiting.num_tokens
        assert sum(request.num_waiting_tokens for request in waiting) == counted, "lost tokens"
        preempted = sum(request.status is RequestStatus.PREEMPTED for request in waiting)
        assert preempted == self.num_preempted, "preempted requests are counted wrongly"
        assert self._requests or self._kv.num_free_blocks == self._kv.num_blocks, "idle with blocks"
