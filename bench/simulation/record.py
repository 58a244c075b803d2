"""What is kept of a simulated run: arrays over requests, counts over steps, no object per token."""

import math
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from bench.summary import Distribution

__all__ = ["GapHistogram", "ReplicaRecord"]

# Gaps are counted by logarithm: percentiles are within half a percent.
LOG_STEP = math.log(1.01)


class GapHistogram:
    """How often which time passed between two tokens of a request."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._sum_s = 0.0
        self._max_s = 0.0

    def add(self, gap_s: float, count: int) -> None:
        """Count a gap, which must be positive."""
        self._counts[round(math.log(gap_s) / LOG_STEP)] += count
        self._sum_s += gap_s * count
        self._max_s = max(self._max_s, gap_s)

    def merge(self, other: "GapHistogram") -> None:
        """Take over the counts of another."""
        self._counts.update(other._counts)
        self._sum_s += other._sum_s
        self._max_s = max(self._max_s, other._max_s)

    def distribution(self) -> Distribution | None:
        """Mean and maximum exact, percentiles within half a percent; None without any gap."""
        total = self._counts.total()
        if total == 0:
            return None
        return Distribution(
            mean=1e3 * self._sum_s / total,
            p50=1e3 * self._percentile_s(0.50, total),
            p90=1e3 * self._percentile_s(0.90, total),
            p99=1e3 * self._percentile_s(0.99, total),
            max=1e3 * self._max_s,
        )

    def _percentile_s(self, share: float, total: int) -> float:
        seen = 0
        for key in sorted(self._counts):
            seen += self._counts[key]
            if seen >= share * total:
                return min(math.exp(key * LOG_STEP), self._max_s)
        return self._max_s


def doubles() -> "array[float]":
    return array("d")


def integers() -> "array[int]":
    return array("q")


@dataclass(slots=True, kw_only=True)
class ReplicaRecord:
    """One replica's run. Columns have an entry for each request that produced all its tokens.

    Attributes:
        index: which request of the trace.
        queue_s, ttft_s, decode_s, e2e_s, cached_tokens, preemptions: as in RequestTiming.
        timed_out: requests that left the queue unserved.
        gaps: time between tokens, over all requests.
        num_slots, wasted_slots: token slots computed, and those among them that held no token.
        busy_s: time during which the device computed.
        seq_s, kv_use_s: integral over that time of the requests in the step, and of the share of
            the KV blocks that requests hold.
        end_s: when the last step ended.
    """

    index: "array[int]" = field(default_factory=integers)
    queue_s: "array[float]" = field(default_factory=doubles)
    ttft_s: "array[float]" = field(default_factory=doubles)
    decode_s: "array[float]" = field(default_factory=doubles)
    e2e_s: "array[float]" = field(default_factory=doubles)
    cached_tokens: "array[int]" = field(default_factory=integers)
    preemptions: "array[int]" = field(default_factory=integers)
    timed_out: "array[int]" = field(default_factory=integers)
    gaps: GapHistogram = field(default_factory=GapHistogram)
    num_steps: int = 0
    num_tokens: int = 0
    num_slots: int = 0
    wasted_slots: int = 0
    num_preemptions: int = 0
    busy_s: float = 0.0
    seq_s: float = 0.0
    kv_use_s: float = 0.0
    kv_use_max: float = 0.0
    end_s: float = 0.0

    def count_step(
        self,
        *,
        duration_s: float,
        num_seqs: int,
        num_tokens: int,
        num_slots: int,
        kv_use: float,
        num_preempted: int,
    ) -> None:
        """Count a step that the device was given."""
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.num_slots += num_slots
        self.wasted_slots += num_slots - num_tokens
        self.num_preemptions += num_preempted
        self.busy_s += duration_s
        self.seq_s += num_seqs * duration_s
        self.kv_use_s += kv_use * duration_s
        self.kv_use_max = max(self.kv_use_max, kv_use)

    @classmethod
    def merged(cls, records: Iterable["ReplicaRecord"]) -> "ReplicaRecord":
        """One record that stands for many."""
        whole = cls()
        for record in records:
            for name in COLUMNS:
                getattr(whole, name).extend(getattr(record, name))
            for name in SUMS:
                setattr(whole, name, getattr(whole, name) + getattr(record, name))
            whole.gaps.merge(record.gaps)
            whole.kv_use_max = max(whole.kv_use_max, record.kv_use_max)
            whole.end_s = max(whole.end_s, record.end_s)
        return whole


COLUMNS = (
    *("index", "queue_s", "ttft_s", "decode_s", "e2e_s"),
    *("cached_tokens", "preemptions", "timed_out"),
)
SUMS = (
    *("num_steps", "num_tokens", "num_slots", "wasted_slots", "num_preemptions"),
    *("busy_s", "seq_s", "kv_use_s"),
)
