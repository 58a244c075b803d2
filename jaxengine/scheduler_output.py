"""A step as the scheduler decided it: who runs, and how many tokens each gets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxengine.request import Request
from jaxengine.step_time import StepWork

__all__ = ["ScheduledRequest", "SchedulerOutput"]

# What is computed where a row of a batch has no token of its own.
PADDING_ID = 0


class ScheduledRequest(NamedTuple):
    """One request's share of a step.

    Attributes:
        first_position: position of its first token in this step.
        num_new_tokens: tokens to compute.
        row: place in the device state.
        block_ids: its block table, which grows and goes with the request: read it before the
            next step is scheduled.
        samples: the step reaches the request's last token, so a new one is sampled.
        last_is_pending: the last token to compute is known to the device only.
        draft_id: a token that was guessed, if that is what this computes. There is no such row, and
            the same step has the request's own next token.
        is_filler: its tokens are none of the request's, only computed as if they were.
    """

    request: Request
    first_position: int
    num_new_tokens: int
    row: int
    block_ids: Sequence[int]
    samples: bool
    last_is_pending: bool
    draft_id: int | None = None
    is_filler: bool = False

    @property
    def is_draft(self) -> bool:
        return self.draft_id is not None

    @property
    def token_ids(self) -> Sequence[int]:
        """Tokens to compute that the host knows; one short if `last_is_pending`."""
        if self.draft_id is not None:
            return (self.draft_id,)
        if self.is_filler:
            return (PADDING_ID,) * self.num_new_tokens
        end = self.first_position + self.num_new_tokens - self.last_is_pending
        return self.request.token_ids[self.first_position : end]


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOutput:
    """One step.

    Attributes:
        num_tokens: tokens to compute, over all requests.
        num_preempted: requests that lost their row for it, and their blocks if these were lacking.
        padding, ended_rows: fillers, to be computed besides: padding of prompts, and a token for
            each ended request of a batch that has not ended.
        waiting_for: what the first waiting request waits for, as in StepRecord.
        work: what the device has to do.
        pause_after_s: how long it may run before others should run before its rest; None: to its
            end.
    """

    scheduled: tuple[ScheduledRequest, ...]
    num_tokens: int
    num_preempted: int = 0
    padding: tuple[ScheduledRequest, ...] = ()
    ended_rows: tuple[ScheduledRequest, ...] = ()
    waiting_for: str = ""
    work: StepWork
    pause_after_s: float | None = None

    @property
    def items(self) -> tuple[ScheduledRequest, ...]:
        """All that the device computes; the scheduled requests first."""
        return self.scheduled + self.padding + self.ended_rows

    def written_blocks(self, block_size: int) -> frozenset[int]:
        """Return the blocks that it writes to, given how many tokens they hold."""
        return frozenset(
            item.block_ids[index]
            for item in self.items
            for index in range(
                item.first_position // block_size,
                (item.first_position + item.num_new_tokens - 1) // block_size + 1,
            )
        )

    def lost_blocks(self) -> frozenset[int]:
        """Return the blocks that it reads or writes, and its requests have given back since."""
        return frozenset(
            block_id
            for item in self.items
            if item.block_ids is not item.request.block_ids
            for block_id in item.block_ids
        )

    @property
    def padding_slots(self) -> int:
        return sum(item.num_new_tokens for item in self.padding)

    @property
    def wasted_slots(self) -> int:
        """Token slots of fillers."""
        return self.padding_slots + len(self.ended_rows)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing for the device to do."""
        return not self.items
