"""What every step did, and when: the newest steps, for those who watch."""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

__all__ = ["StepLog", "StepRecord", "StepShare"]


class StepShare(NamedTuple):
    """One request's part of a step.

    Attributes:
        first_position: position of its first token in this step.
        num_tokens: tokens computed.
        samples: whether a token was sampled for it.
    """

    request_id: str
    first_position: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step. Times are on the `time.monotonic` clock.

    Attributes:
        index: counts up from 0 without gaps.
        scheduled_s: when scheduling began.
        launched_s: when the device had been given the step.
        device_start_s: when the device could begin it: launched, and the step before it done.
        end_s: when its tokens reached the host.
        overtaken_s: how long steps took that ran before the rest of this one.
        predicted_s: what the cost model said `duration_s` would be; None without one.
        num_decodes, num_prefills: requests that got one token as their newest, or a part of
            their prompt (or of what a preemption lost).
        decode_tokens, prefill_tokens: tokens computed for either.
        draft_tokens, accepted_draft_tokens: guessed tokens computed along, and the right ones among
            them.
        num_slots: token slots that the device computed: the bucket, unless it leaves out padding.
        wasted_slots: those that held no token, for whatever reason.
        num_preempted: requests that made room for others in this step.
        num_running, num_waiting: requests after scheduling.
        waiting_for: what the first waiting request waits for: "" if none waits, else "seqs",
            "kv_cache", "tokens", "batch" or "preemption".
        num_used_blocks, num_cached_blocks, num_free_blocks: KV blocks held by requests; free but
            still holding a cached prefix; free and empty. They add up to all usable ones.
        shares: who got what, in packed order of scheduling.
    """

    index: int
    scheduled_s: float
    launched_s: float
    device_start_s: float
    end_s: float
    overtaken_s: float = 0.0
    predicted_s: float | None
    num_decodes: int
    num_prefills: int
    decode_tokens: int
    prefill_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int
    num_slots: int
    wasted_slots: int
    num_preempted: int
    num_running: int
    num_waiting: int
    waiting_for: str
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    shares: tuple[StepShare, ...]

    @property
    def duration_s(self) -> float:
        """Time on the device."""
        return self.end_s - self.device_start_s - self.overtaken_s


class StepLog:
    """The last `capacity` steps. Written and read on the event loop only."""

    def __init__(self, capacity: int) -> None:
        self._records: deque[StepRecord] = deque(maxlen=capacity)
        self._arrival = asyncio.Event()

    @property
    def last_index(self) -> int:
        """Index of the newest step, -1 before the first."""
        return self._records[-1].index if self._records else -1

    def extend(self, records: Iterable[StepRecord]) -> None:
        """Add steps, in order, and wake whoever waits."""
        self._records.extend(records)
        self._arrival.set()

    def after(self, index: int) -> Sequence[StepRecord]:
        """Return the steps after `index` that are still kept, oldest first."""
        num_new = min(len(self._records), self.last_index - index)
        start = len(self._records) - max(num_new, 0)
        return tuple(islice(self._records, start, None))

    async def wait_after(self, index: int) -> Sequence[StepRecord]:
        """Return the steps after `index`, waiting for one if there is none. Cancelling is safe."""
        while self.last_index <= index:
            self._arrival.clear()
            await self._arrival.wait()
        return self.after(index)
