"""The figures of a simulated run, from its records."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bench.simulation.record import ReplicaRecord
from bench.simulation.workload import Floats, Ints, Trace
from bench.summary import Distribution, Goodput

__all__ = ["Figures", "figures_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """One run. Rates are over the whole duration, from the first arrival to the last end.

    Attributes:
        num_completed, num_timed_out: together all requests.
        request_rate: arrivals per second; None if all came at once.
        goodput_per_s, goodput_share: completed requests that met the objective; None without one.
        tpot_ms: per request, time from first to last token over the tokens after the first.
        mean_seqs: requests in a step, weighted by its time.
        busy_share: of the replicas' time, that with a step on the device.
        kv_use_mean, kv_use_max: share of the blocks that requests hold, while the device works.
        preemption_share: completed requests that were preempted at least once.
        prefix_hit_rate: prompt tokens that came from the prefix cache.
        wasted_share: token slots that held no token.
        imbalance: tokens computed by the busiest replica over the mean.
        heavy_ttft_p99_ms, light_ttft_p99_ms: of the first tenant and of all others.
        urgent_ttft_p99_ms: of requests with a priority before the default.
    """

    num_requests: int
    num_completed: int
    num_timed_out: int
    duration_s: float
    request_rate: float | None
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    goodput_per_s: float | None
    goodput_share: float | None
    queue_ms: Distribution | None
    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    tpot_ms: Distribution | None
    e2e_ms: Distribution | None
    num_steps: int
    mean_seqs: float
    busy_share: float
    kv_use_mean: float
    kv_use_max: float
    num_preemptions: int
    preemption_share: float
    prefix_hit_rate: float
    wasted_share: float
    imbalance: float
    heavy_ttft_p99_ms: float | None
    light_ttft_p99_ms: float | None
    urgent_ttft_p99_ms: float | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def figures_of(
    trace: Trace, records: Sequence[ReplicaRecord], *, goodput: Goodput | None = None
) -> Figures:
    """Turn the records of all replicas into figures.

    Args:
        trace: what was asked.
        records: one per replica.
        goodput: demands to count good requests by.
    """
    whole = ReplicaRecord.merged(records)
    index: Ints = np.array(whole.index, dtype=np.int64)
    ttft_s, e2e_s = np.array(whole.ttft_s), np.array(whole.e2e_s)
    later_tokens = trace.output_len[index] - 1
    tpot_s = np.array(whole.decode_s)[later_tokens > 0] / later_tokens[later_tokens > 0]
    first_s = float(trace.arrival_s[0])
    duration_s = max(whole.end_s - first_s, 1e-9)
    arriving_s = float(trace.arrival_s[-1]) - first_s
    prompt_tokens = int(trace.prompt_len[index].sum())
    good = None if goodput is None else count_good(goodput, ttft_s, tpot_s, later_tokens > 0, e2e_s)
    tenant, urgent = trace.tenant[index], trace.priority[index] < 0
    loads = [record.num_tokens for record in records]
    busy_s = max(whole.busy_s, 1e-9)
    return Figures(
        num_requests=len(trace),
        num_completed=len(index),
        num_timed_out=len(whole.timed_out),
        duration_s=duration_s,
        request_rate=len(trace) / arriving_s if arriving_s > 0 else None,
        requests_per_s=len(index) / duration_s,
        prompt_tokens_per_s=prompt_tokens / duration_s,
        output_tokens_per_s=int(trace.output_len[index].sum()) / duration_s,
        goodput_per_s=None if good is None else good / duration_s,
        goodput_share=None if good is None else good / len(trace),
        queue_ms=distribution(np.array(whole.queue_s)),
        ttft_ms=distribution(ttft_s),
        itl_ms=whole.gaps.distribution(),
        tpot_ms=distribution(tpot_s),
        e2e_ms=distribution(e2e_s),
        num_steps=whole.num_steps,
        mean_seqs=whole.seq_s / busy_s,
        busy_share=whole.busy_s / (duration_s * len(records)),
        kv_use_mean=whole.kv_use_s / busy_s,
        kv_use_max=whole.kv_use_max,
        num_preemptions=whole.num_preemptions,
        preemption_share=float(np.mean(np.array(whole.preemptions) > 0)) if len(index) else 0.0,
        prefix_hit_rate=sum(whole.cached_tokens) / max(prompt_tokens, 1),
        wasted_share=whole.wasted_slots / max(whole.num_slots, 1),
        imbalance=max(loads) * len(loads) / max(sum(loads), 1),
        heavy_ttft_p99_ms=p99_ms(ttft_s[tenant == 0]) if tenant.any() else None,
        light_ttft_p99_ms=p99_ms(ttft_s[tenant > 0]),
        urgent_ttft_p99_ms=p99_ms(ttft_s[urgent]),
    )


def distribution(values_s: Floats) -> Distribution | None:
    """As Distribution.of_seconds, for a million values."""
    if len(values_s) == 0:
        return None
    p50, p90, p99 = np.percentile(values_s, (50, 90, 99))
    return Distribution(
        mean=1e3 * float(values_s.mean()),
        p50=1e3 * float(p50),
        p90=1e3 * float(p90),
        p99=1e3 * float(p99),
        max=1e3 * float(values_s.max()),
    )


def p99_ms(values_s: Floats) -> float | None:
    """None of no values."""
    return 1e3 * float(np.percentile(values_s, 99)) if len(values_s) else None


def count_good(
    goodput: Goodput,
    ttft_s: Floats,
    tpot_s: Floats,
    has_tpot: "np.typing.NDArray[np.bool_]",
    e2e_s: Floats,
) -> int:
    """Completed requests that met every demand; a single token has no ITL to fail."""
    good = np.ones(len(ttft_s), dtype=bool)
    good &= 1e3 * ttft_s <= limit(goodput.ttft_ms)
    good &= 1e3 * e2e_s <= limit(goodput.e2e_ms)
    good[has_tpot] &= 1e3 * tpot_s <= limit(goodput.itl_ms)
    return int(good.sum())


def limit(value_ms: float | None) -> float:
    return math.inf if value_ms is None else value_ms
