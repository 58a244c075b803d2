"""Speculation from the prompt: guessed tokens are computed along, and kept if they were right.

A guessed token, a draft, is one more row of the step: a single token of the same request at the
next position, after which a token is sampled as after any other. Logits do not depend on what else
is in a step, and what is sampled depends on logits, seed and position only. So as long as what is
sampled equals the next draft, the token after that is what it would have been one step later, bit
by bit; the first that differs is right itself, and what follows it is dropped.

Nothing is ever undone. Drafts are not counted as computed before they are accepted. What rejected
ones have written lies beyond all counted tokens, where nobody reads before it is written anew.

Where a draft belongs depends on how many of the last ones were right, so a request with drafts in
flight sits out until these are known; and one whose last token is on its way has to wait for it
before it can guess. That costs a step that others use, or, if it is the same for all, the overlap
of host and device.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from jaxengine.buckets import buckets_for
from jaxengine.config import EngineConfig
from jaxengine.kv_cache_manager import KVCacheManager
from jaxengine.outputs import FinishReason
from jaxengine.prompt_lookup import PromptLookup
from jaxengine.request import Request, RequestStatus
from jaxengine.scheduler_output import ScheduledRequest, SchedulerOutput
from jaxengine.step_draft import StepDraft
from jaxengine.step_time import StepTimeModel, StepWork
from jaxengine.tenants import DECODE_COST

__all__ = ["Speculation"]

# Drafts less likely to be accepted are not worth their row.
LEAST_CHANCE = 0.2

# How much faster tokens must come if the host's work is no longer hidden behind the device's.
LEAST_SPEEDUP = 1.1

# Further tokens that a request must expect to give up a step that others take: one for that step,
# and something for its trouble.
LEAST_GAIN = 1.2


class _Draft(NamedTuple):
    """A token that might be computed along; those that sort first first."""

    improbability: float
    place: int  # among the drafts of its request
    num_context: int
    request_index: int


class Speculation:
    """Decides how many tokens to guess, puts them into steps, and counts what came of them.

    Args:
        step_times: predicts steps; without it a draft costs nothing.

    Attributes:
        num_drafted: drafts that steps computed whose tokens are known.
        num_accepted: those among them that were right.
    """

    def __init__(
        self, config: EngineConfig, kv: KVCacheManager, step_times: StepTimeModel | None
    ) -> None:
        self._most = config.num_speculative_tokens
        self._no_row = config.max_num_seqs + 1  # behind the spare one: nothing is remembered there
        self._kv = kv
        self._step_times = step_times
        self._target_itl_s = config.target_itl_s
        self._watermark_blocks = config.watermark_blocks
        buckets = buckets_for(config)
        self._sizes = sorted({bucket.num_tokens for bucket in buckets})
        self._most_seqs = max(bucket.num_seqs for bucket in buckets)
        self.num_drafted = 0
        self.num_accepted = 0

    def sitting_out(self, running: Sequence[Request], *, is_crowded: bool) -> Collection[Request]:
        """Return who gets no token in the next step, so as to know its last one before.

        Args:
            running: all requests that run.
            is_crowded: somebody waits, so a step must be launched.
        """
        if not self._most or not any(request.num_pending_tokens for request in running):
            return ()
        in_flight = {request for request in running if request.num_draft_tokens}
        hopeful: list[tuple[Request, float]] = []
        drafts: list[_Draft] = []
        num_others = 0
        for index, request in enumerate(running):
            if request in in_flight or _is_ending(request):
                continue
            most = min(self._most, request.max_num_tokens - request.num_tokens - 1)
            chance = self._chance(request)
            # What is on its way must be as guessed, too, for the guesses to go on from there.
            before = chance if request.num_pending_tokens else 1.0
            its_drafts = _drafts(chance, most, request.num_tokens, index, before=before)
            gain = sum(-draft.improbability for draft in its_drafts)
            drafts += its_drafts
            if its_drafts:
                hopeful.append((request, gain))
            else:
                num_others += 1
        if not hopeful:
            return in_flight
        count, speedup = self._best_count(drafts, _decodes_of(running))
        if not num_others and not is_crowded and (in_flight or speedup >= LEAST_SPEEDUP):
            return running  # nobody needs the step, and all guess together in the next one
        return in_flight.union(
            request
            for request, gain in hopeful
            if count and gain >= LEAST_GAIN and request.num_pending_tokens
        )

    def add_drafts(self, step: StepDraft) -> None:
        """Let requests that decode in the step guess, with what is left of its budgets."""
        if not self._most:
            return
        items = [
            item
            for item in step.scheduled
            if item.samples
            and item.num_new_tokens == 1
            and item.first_position == len(item.request.token_ids) - 1
        ]
        drafts: list[_Draft] = []
        for index, item in enumerate(items):
            request = item.request
            most = min(self._most, request.max_num_tokens - request.num_tokens)
            chance = self._chance(request)
            drafts += _drafts(chance, most, len(request.token_ids), index)
        room = min(step.budget, self._most_seqs - len(step.scheduled))
        drafts = sorted(drafts)[: max(room, 0)]
        count, _ = self._best_count(drafts, step.work)
        wanted = [0] * len(items)
        for draft in drafts[:count]:
            wanted[draft.request_index] += 1
        for item, most in zip(items, wanted, strict=True):
            if most:
                self._guess(step, item.request, most, num_spare_blocks=len(step.scheduled))

    def further_tokens(
        self, output: SchedulerOutput, sampled: Sequence[int]
    ) -> Mapping[Request, Sequence[int]]:
        """Return the tokens after the first that each request gets by a finished step."""
        if not self._most or not any(item.is_draft for item in output.scheduled):
            return {}
        found: dict[Request, list[int]] = {}
        for item, token_id in zip(output.scheduled, sampled, strict=True):
            if not item.is_draft:
                found[item.request] = [token_id]
                continue
            # All before it were right, and so is it.
            right = found[item.request]
            num_before = item.first_position - len(item.request.token_ids)
            if len(right) == num_before + 1 and right[-1] == item.draft_id:
                right.append(token_id)
            self.num_drafted += 1
        return {request: right[1:] for request, right in found.items() if len(right) > 1}

    def settle(
        self, item: ScheduledRequest, tokens: Sequence[int], now_s: float
    ) -> tuple[Sequence[int], FinishReason | None]:
        """Give a request the tokens that it got besides its own next one.

        Args:
            item: the request with the token before its drafts.
            tokens: its `further_tokens`.
            now_s: when they arrived.

        Returns:
            Those up to its end, and why it ends with the last of them, if it does.
        """
        request, reason, num_accepted = item.request, None, 0
        request.num_draft_tokens = 0
        while num_accepted < len(tokens) and reason is None:
            request.num_pending_tokens += 1
            reason = request.append(tokens[num_accepted], now_s)
            num_accepted += 1
        self._count_as_computed(request, num_accepted, end=item.first_position + 1)
        self.num_accepted += num_accepted
        return tokens[:num_accepted], reason

    def _count_as_computed(self, request: Request, num_accepted: int, *, end: int) -> None:
        """Count accepted drafts among the tokens with K and V, behind the first `end`."""
        # One that lost its blocks meanwhile has nothing computed.
        if request.num_computed_tokens == end:
            self._kv.remember(request, end + num_accepted)
            request.num_computed_tokens += num_accepted
        num_new = end + num_accepted - request.num_charged_tokens
        request.account.charge(max(num_new, 0) * DECODE_COST)
        request.num_charged_tokens += max(num_new, 0)

    def _chance(self, request: Request) -> float:
        """Return how likely a request's next guess is right; 0 if there is none."""
        if (
            not request.wants_only_tokens
            or request.status is not RequestStatus.RUNNING
            or request.num_tokens - request.num_computed_tokens > 1
        ):
            return 0.0
        lookup = request.lookup
        if lookup is None:
            lookup = request.lookup = PromptLookup(request.token_ids, request.num_prompt_tokens)
        lookup.catch_up()
        return lookup.chance if lookup.has_guess else 0.0

    def _best_count(self, drafts: Sequence[_Draft], work: StepWork) -> tuple[int, float]:
        """Return how many of the drafts make tokens come fastest, and by what factor."""
        most = len(drafts)
        if self._step_times is None or not most:
            gain = -sum(draft.improbability for draft in drafts)
            return most, 1 + gain / max(work.num_seqs, 1)
        plain_s = self._step_times.predict(work)
        limit_s = max(plain_s, self._target_itl_s or float("inf"))
        plain_speed = work.num_seqs / plain_s
        best, best_speed = 0, plain_speed
        num_expected, context, taken = float(work.num_seqs), 0, 0
        # Only a bucket's last rows can be the best: those before cost next to nothing.
        rooms = [size - work.num_tokens for size in self._sizes if size > work.num_tokens]
        for count in sorted({min(room, most) for room in rooms}):
            num_expected -= sum(draft.improbability for draft in drafts[taken:count])
            context += sum(draft.num_context for draft in drafts[taken:count])
            taken = count
            if work.num_seqs + count > self._most_seqs:
                break
            time_s = self._step_times.predict(
                work._replace(
                    num_tokens=work.num_tokens + count,
                    num_seqs=work.num_seqs + count,
                    decode_context=work.decode_context + context,
                )
            )
            if time_s <= limit_s and num_expected / time_s > best_speed:
                best, best_speed = count, num_expected / time_s
        return best, best_speed / plain_speed

    def _guess(
        self, step: StepDraft, request: Request, most: int, *, num_spare_blocks: int
    ) -> None:
        """Put guesses into the step, if there are blocks for them that nobody else will want."""
        lookup, first = request.lookup, len(request.token_ids)
        assert lookup is not None
        if (
            first + most > request.num_slots
            and self._kv.num_free_blocks > self._watermark_blocks + num_spare_blocks
        ):
            self._kv.reserve(request, first + most)
        most = min(most, request.num_slots - first)
        for position, token_id in enumerate(lookup.guess(most), first):
            step.take_draft(request, position, token_id, row=self._no_row)


def _drafts(
    chance: float, most: int, num_tokens: int, request_index: int, *, before: float = 1.0
) -> list[_Draft]:
    """Return a request's drafts that are likely enough; each needs all before it to be right."""
    found = []
    for place in range(most):
        before *= chance
        if before < LEAST_CHANCE:
            break
        found.append(_Draft(-before, place, num_tokens + place + 1, request_index))
    return found


def _decodes_of(running: Sequence[Request]) -> StepWork:
    """Return what a step costs that gives each a token."""
    return StepWork(
        num_tokens=len(running),
        num_seqs=len(running),
        decode_only=True,
        decode_context=sum(request.num_tokens for request in running),
        prefill_context=0,
        num_sampled=sum(request.samples_at_random for request in running),
        chunk_context=0,
    )


def _is_ending(request: Request) -> bool:
    """Whether its last token is on its way, so that it wants no step any more."""
    return bool(request.num_pending_tokens) and request.num_tokens >= request.max_num_tokens
