"""A step while the scheduler is still putting it together."""

from jaxengine.request import Request
from jaxengine.scheduler_output import ScheduledRequest, SchedulerOutput
from jaxengine.step_time import StepWork
from jaxengine.tenants import DECODE_COST, PROMPT_COST

__all__ = ["StepDraft"]

# A filler remembers nothing on the device.
NO_ROW = -1


class StepDraft:
    """What has been taken into the step, and the tokens that are left.

    Attributes:
        budget: token slots that may still be taken.
        scheduled: the requests so far.
        padding, ended_rows: as in SchedulerOutput, so far.
        num_decodes: those among all of them with one token.
        prompts: the requests that got a part of their prompt. Others that came after them may
            share their blocks already, so they must stay in the step.
        filled: the requests whose token fills a block. It may be shared once it is certain
            that the step computes it.
        waiting_for: what the first waiting request waits for, as in StepRecord.
    """

    def __init__(self, budget: int) -> None:
        self._full_budget = budget
        self.budget = budget
        self.scheduled: list[ScheduledRequest] = []
        self.padding: list[ScheduledRequest] = []
        self.ended_rows: list[ScheduledRequest] = []
        self.num_decodes = 0
        self.prompts: set[Request] = set()
        self.filled: list[Request] = []
        self.waiting_for = ""
        self._wasted_slots = 0
        self._decode_context = 0
        self._prefill_context = 0
        self._chunk_context = 0
        self._num_sampled = 0

    @property
    def num_seqs(self) -> int:
        return len(self.scheduled) + len(self.padding) + len(self.ended_rows)

    @property
    def has_prompts(self) -> bool:
        """Whether a request got more than one token."""
        return self.num_seqs > self.num_decodes

    @property
    def work(self) -> StepWork:
        """What the device has to do so far."""
        return StepWork(
            num_tokens=self._full_budget - self.budget,
            num_seqs=self.num_seqs,
            decode_only=not self.has_prompts,
            decode_context=self._decode_context,
            prefill_context=self._prefill_context,
            num_sampled=self._num_sampled,
            chunk_context=self._chunk_context,
        )

    def take(self, request: Request, num_new_tokens: int) -> None:
        """Put a request's next tokens into the step, count them as computed, and charge them."""
        first = request.num_computed_tokens
        end = first + num_new_tokens
        num_known = len(request.token_ids)
        samples = end == num_known + request.num_pending_tokens
        row = request.row
        assert row is not None, f"{request} runs without a row"
        self.scheduled.append(
            ScheduledRequest(
                request, first, num_new_tokens, row, request.block_ids, samples, end > num_known
            )
        )
        self.prompts.add(request)
        self.budget -= num_new_tokens
        request.num_computed_tokens = end
        if samples:
            request.num_pending_tokens += 1
            self._num_sampled += request.samples_at_random
        # What a preemption lost has been charged before.
        num_charged = request.num_charged_tokens
        if end > num_charged:
            cost = PROMPT_COST if end <= request.num_prompt_tokens else DECODE_COST
            request.account.charge((end - num_charged) * cost)
            request.num_charged_tokens = end
        self._count_context(first, end)

    def take_token(self, request: Request) -> None:
        """Do as `take` does with a request that needs one token, its last: most of the work."""
        first = request.num_computed_tokens
        row = request.row
        assert row is not None, f"{request} runs without a row"
        self.scheduled.append(
            ScheduledRequest(
                request, first, 1, row, request.block_ids, True, first >= len(request.token_ids)
            )
        )
        self.budget -= 1
        self.num_decodes += 1
        first += 1
        self._decode_context += first
        request.num_computed_tokens = first
        request.num_pending_tokens += 1
        self._num_sampled += request.samples_at_random
        if first > request.num_charged_tokens:
            request.account.charge(DECODE_COST)
            request.num_charged_tokens = first

    def take_draft(self, request: Request, position: int, token_id: int, *, row: int) -> None:
        """Compute a guessed token along with the request's next one, which is in the step.

        Args:
            request: who guesses.
            position: of the token in it.
            token_id: the token.
            row: one that there is not.
        """
        self.scheduled.append(
            ScheduledRequest(request, position, 1, row, request.block_ids, True, False, token_id)
        )
        self.budget -= 1
        self.num_decodes += 1
        self._decode_context += position + 1
        self._num_sampled += request.samples_at_random
        request.num_draft_tokens += 1

    def drop(self, request: Request) -> None:
        """Take a decoding request out again, which is preempted, if it is in.

        What it was charged it will not be again.
        """
        assert request not in self.prompts, f"others may share what {request} computes"
        item = next((item for item in self.scheduled if item.request is request), None)
        if item is None:
            return
        self.scheduled.remove(item)
        self.budget += 1
        self.num_decodes -= 1
        self._decode_context -= request.num_computed_tokens
        self._num_sampled -= request.samples_at_random
        request.num_computed_tokens = item.first_position
        request.num_pending_tokens -= 1

    def pad(self, request: Request, first_position: int, num_slots: int) -> None:
        """Fill slots of a request's row that pad its prompt."""
        self.padding.append(self._filler(request, first_position, num_slots))

    def fill_ended_row(self, request: Request, position: int) -> None:
        """Fill a slot of a request that has ended while its batch has not."""
        self.ended_rows.append(self._filler(request, position, 1))

    def output(
        self, *, num_preempted: int = 0, pause_after_s: float | None = None
    ) -> SchedulerOutput:
        """Return the finished step; the arguments are as in SchedulerOutput."""
        return SchedulerOutput(
            scheduled=tuple(self.scheduled),
            num_tokens=self._full_budget - self.budget - self._wasted_slots,
            num_preempted=num_preempted,
            padding=tuple(self.padding),
            ended_rows=tuple(self.ended_rows),
            waiting_for=self.waiting_for,
            work=self.work,
            pause_after_s=pause_after_s,
        )

    def _filler(self, request: Request, first: int, num_slots: int) -> ScheduledRequest:
        self.budget -= num_slots
        self._wasted_slots += num_slots
        self._count_context(first, first + num_slots)
        return ScheduledRequest(
            request, first, num_slots, NO_ROW, request.block_ids, False, False, is_filler=True
        )

    def _count_context(self, first: int, end: int) -> None:
        """Count what the tokens first..end of a sequence attend to."""
        if end == first + 1:
            self.num_decodes += 1
            self._decode_context += end
        else:
            self._prefill_context += _context_pairs(first, end)
            self._chunk_context += end


def _context_pairs(first: int, end: int) -> int:
    """Return how many positions the tokens first..end attend to in all: i + 1 for token i."""
    return (end - first) * (first + end + 1) // 2
