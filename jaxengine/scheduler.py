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

from collections.abc import Collection, Iterable, Sequence

from jaxengine.batching import ClosedBatch
from jaxengine.config import EngineConfig
from jaxengine.expiry import ExpiryQueue
from jaxengine.kv_cache_manager import KVCacheManager
from jaxengine.outputs import FinishReason, RequestOutput
from jaxengine.preemption import goes_first
from jaxengine.prompt_budget import LongPiece, PromptBudget
from jaxengine.request import Request, RequestStatus
from jaxengine.roster import Roster
from jaxengine.scheduler_output import SchedulerOutput
from jaxengine.speculation import Speculation
from jaxengine.step_draft import StepDraft
from jaxengine.step_time import StepTimeModel

__all__ = ["Scheduler"]


class Scheduler:
    """Budgets, and who gets how much of them.

    Never: touches the device or reads a clock; times come in as arguments.

    Attributes:
        roster: the requests.
        speculation: what guesses tokens of theirs.
        generation_tokens: tokens sampled so far.

    Args:
        step_times: needed for `target_itl_s`.
        can_overtake: a step can be run before the rest of one that runs.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCacheManager,
        *,
        eos_token_ids: Sequence[int],
        step_times: StepTimeModel | None = None,
        can_overtake: bool = False,
    ) -> None:
        self._config = config
        self._takes_long_pieces = can_overtake and not config.num_speculative_tokens
        self._kv = kv
        self._prompt_budget = PromptBudget(config, step_times)
        self._batch = None if config.batching == "continuous" else ClosedBatch(config, kv)
        self.speculation = Speculation(config, kv, step_times)
        self.roster = Roster(config, kv, eos_token_ids=eos_token_ids, batch=self._batch)
        self._expiry = ExpiryQueue()
        # A prompt whose next piece is to be computed alone, in the next step.
        self._next_alone: tuple[Request, LongPiece] | None = None
        self.generation_tokens = 0

    @property
    def num_running(self) -> int:
        return len(self.roster.running)

    @property
    def num_waiting(self) -> int:
        return len(self.roster.waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that waiting requests have to compute, as far as is known."""
        return self.roster.waiting.num_tokens

    @property
    def has_requests(self) -> bool:
        return bool(self.roster)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.roster.add(request)
        self._expiry.add(request)
        if self._batch is not None:
            self._batch.note_arrival(request.arrival_time_s)

    def expire(self, now_s: float) -> list[RequestOutput]:
        """End the requests whose time is up."""
        due = self._expiry.pop_due(now_s)
        return [self.roster.end(request, reason, now_s) for request, reason in due]

    def next_event_s(self, now_s: float) -> float | None:
        """Return when `expire` or `schedule` may next have something to do; None if never."""
        if self.roster.running or (self._batch is None and self.roster.waiting):
            return now_s
        if self._batch is None or not self.roster.waiting:
            return None
        opens_at_s = self._batch.opens_at_s(self.roster.waiting)
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
        preemptions_before = self.roster.num_preemptions
        next_alone, self._next_alone = self._next_alone, None
        if next_alone is not None and next_alone[0].status is RequestStatus.RUNNING:
            return self._schedule_alone(draft, *next_alone)
        if self._batch is None:
            prompts = self._schedule_decodes(draft)
            may_join = self.roster.num_preemptions == preemptions_before
            self._schedule_prompts(draft, prompts, now_s, may_join=may_join)
        else:
            self._schedule_batch(draft, self._batch, now_s)
        for request in draft.filled:  # those preempted since then have no computed tokens
            self._kv.remember(request, request.num_computed_tokens)
        self.speculation.add_drafts(draft)
        return draft.output(num_preempted=self.roster.num_preemptions - preemptions_before)

    def schedule_before(self, running: Sequence[SchedulerOutput], now_s: float) -> SchedulerOutput:
        """Choose who should not wait for the rest of steps in flight, for a step before that.

        Those are newcomers that `may_overtake`, with all of their prompts, and streams, if what
        runs is a long piece of a prompt. Blocks that are still to be written they neither read nor
        get, nor those that are still read, though whom they belonged to has given them back.
        """
        draft = StepDraft(self._config.scheduled_tokens_limit)
        preemptions_before = self.roster.num_preemptions
        unfinished = self._unfinished_blocks(running)
        if running[0].pause_after_s is not None:
            its = {item.request for step in running for item in step.scheduled}
            self._schedule_decodes(draft, others_than=its, unfinished=unfinished)
            self._plan_alone(draft, running[-1].scheduled[0].request)
        while (head := self.roster.waiting.head()) is not None:
            if not self.may_overtake(head, running, draft):
                break
            if self.roster.admit(draft, head, now_s, unfinished):
                break  # something is lacking
            self._kv.remember(head, head.num_tokens)
            draft.take(head, head.num_tokens - head.num_computed_tokens)
        for request in draft.filled:
            self._kv.remember(request, request.num_computed_tokens)
        if self.roster.waiting:  # as others do for what the steps in flight leave
            draft.waiting_for = running[-1].waiting_for or "tokens"
        return draft.output(num_preempted=self.roster.num_preemptions - preemptions_before)

    def may_overtake(
        self,
        request: Request,
        running: Sequence[SchedulerOutput],
        draft: StepDraft | None = None,
    ) -> bool:
        """Whether a request should run before the rest of steps in flight, in a step of its own.

        It has not run yet, its tenant has fewer rows than are its fair share, for which others have
        more, its prompt fits in a step, in time as well, and blocks are free for it.

        Args:
            request: one that waits.
            running: these, the first to end first.
            draft: what runs before them already, if there is something.
        """
        num_tokens = request.num_tokens
        return (
            self._batch is None
            and request.first_scheduled_time_s is None
            and self.roster.is_owed_row(request)
            and self._prompt_budget.allows_before(
                running[0], draft or StepDraft(self._config.scheduled_tokens_limit), num_tokens
            )
            and self.roster.has_blocks_for(request, besides=len(self._unfinished_blocks(running)))
        )

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
                    outputs.append(self.roster.end(request, reason, now_s, new_token_ids=new))
        return outputs

    def abort(self, request_id: str, now_s: float) -> RequestOutput | None:
        """End a request early. Returns its last output, or None if it has ended already."""
        request = self.roster.find(request_id)
        return None if request is None else self.roster.end(request, FinishReason.ABORT, now_s)

    def abort_all(self, now_s: float) -> list[RequestOutput]:
        """End every request early."""
        return [self.roster.end(r, FinishReason.ABORT, now_s) for r in self.roster.all()]

    def fail(self, requests: Sequence[Request], message: str, now_s: float) -> list[RequestOutput]:
        """End the given requests by an error, and let all others start over.

        After a failed step the content of the device's cache is unknown: cached prefixes are
        forgotten and everyone else is recomputed.
        """
        outputs = [
            self.roster.end(request, FinishReason.ERROR, now_s, error=message)
            for request in requests
            if not request.is_finished
        ]
        for request in self.roster.all():
            request.num_pending_tokens = request.num_draft_tokens = 0
        for request in list(self.roster.running):
            self.roster.preempt(request)
        if self._batch is not None:
            self._batch.disband()
        self.roster.clear_prefixes()
        return outputs

    def check_integrity(self) -> None:
        """Raise AssertionError unless requests, rows and blocks are all accounted for."""
        self.roster.check_integrity()

    # One step.

    def _unfinished_blocks(self, steps: Iterable[SchedulerOutput]) -> frozenset[int]:
        """Return the blocks that are no use to others before these steps: see `schedule_before`."""
        block_size = self._config.block_size
        return frozenset[int]().union(
            *(step.written_blocks(block_size) | step.lost_blocks() for step in steps)
        )

    def _plan_alone(self, draft: StepDraft, request: Request) -> bool:
        """Have the next step compute a long piece of a prompt, if that is better than beside these.

        Args:
            draft: a step of those that decode.
            request: it has begun.
        """
        first = request.num_computed_tokens
        num_left = request.num_tokens - first
        if not self._takes_long_pieces or request.num_pending_tokens or num_left < 1:
            return False
        piece = self._prompt_budget.long_piece(draft, first_position=first, num_left=num_left)
        self._next_alone = None if piece is None else (request, piece)
        return piece is not None

    def _schedule_alone(
        self, draft: StepDraft, request: Request, piece: LongPiece
    ) -> SchedulerOutput:
        """Compute a long piece of a prompt; those that decode run before the rest of it."""
        first = request.num_computed_tokens
        num_new = min(piece.num_tokens, request.num_tokens - first)
        self._kv.remember(request, first + num_new)
        draft.take(request, num_new)
        draft.waiting_for = "tokens" if self.roster.waiting else ""
        return draft.output(pause_after_s=piece.pause_after_s)

    def _schedule_decodes(
        self,
        draft: StepDraft,
        *,
        others_than: Collection[Request] = (),
        unfinished: Collection[int] = (),
    ) -> list[Request]:
        """Give a token to each running request that needs just one.

        Args:
            draft: the step.
            others_than: requests that get none.
            unfinished: blocks that nobody may get. Where there are some, nobody is preempted.

        Returns:
            Those that need more: prompts, and what a preemption lost.
        """
        running = list(self.roster.running)
        sitting_out = self.speculation.sitting_out(running, is_crowded=bool(self.roster.waiting))
        prompts = []
        block_size = self._config.block_size
        for request in running:
            if request in others_than:
                continue
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
                and (
                    num_tokens <= request.num_slots
                    or self.roster.make_room(draft, request, num_tokens, unfinished)
                )
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
        is_alone = len(self.roster) == 1
        while draft.budget > 0 and (prompts or may_join):
            if not self._prompt_budget.most_tokens(
                draft, first_position=0, at_most=draft.budget, is_alone=is_alone
            ):
                break
            prompts = [r for r in prompts if r.status is RequestStatus.RUNNING]
            partial = min(prompts, key=lambda r: (r.account.service, r.rank), default=None)
            head = self.roster.waiting.head() if may_join else None
            if head is not None and (partial is None or goes_first(head, partial)):
                draft.waiting_for = self.roster.admit(draft, head, now_s)
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
            if request is partial and not draft.has_prompts and self._plan_alone(draft, request):
                break
            self._kv.remember(request, first + max(num_new, 1))
            draft.take(request, max(num_new, 1))  # it has joined
        if not draft.waiting_for:  # nobody may join in a step that preempted
            draft.waiting_for = "tokens" if may_join else "kv_cache"
        if not self.roster.waiting:
            draft.waiting_for = ""

    def _schedule_batch(self, draft: StepDraft, batch: ClosedBatch, now_s: float) -> None:
        """Start a closed batch if it is time, and compute its prompts or a token of each row."""
        if (
            not self.roster.running
            and self.roster.waiting
            and now_s >= batch.opens_at_s(self.roster.waiting)
        ):
            while (head := self.roster.waiting.head()) is not None and batch.has_room(head):
                self.roster.start(head, batch.add(head), now_s)
            batch.reserve()
        if batch.is_prefilling:
            self._schedule_prompts(draft, batch.prompts, now_s, may_join=False)
            batch.pad_prompts(draft)
        else:
            self._schedule_decodes(draft)
            batch.fill_ended_rows(draft)
        if self.roster.waiting:
            draft.waiting_for = "batch"
