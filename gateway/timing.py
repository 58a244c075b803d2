"""Where the time of one generation went."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from jaxengine.outputs import RequestOutput, RequestTiming

__all__ = ["TimeKeeper", "Timing"]

DIGITS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds to the microsecond, as in jaxengine.outputs.RequestTiming, and inter-token latencies.

    ITL values are None when fewer than two tokens were generated; percentiles are by nearest rank.
    """

    queue_s: float
    prefill_s: float
    decode_s: float
    ttft_s: float | None
    e2e_s: float
    itl_mean_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    itl_max_s: float | None
    num_preemptions: int


class TimeKeeper:
    """Collects token times and ends up with a Timing, whoever ends the request.

    Args:
        arrived_s: when the request was submitted, on the clock of the token times.
        observe_latency: is told the time between two tokens.
    """

    def __init__(self, arrived_s: float, observe_latency: Callable[[float], None]) -> None:
        self._arrived_s = arrived_s
        self._observe_latency = observe_latency
        self._token_times_s: list[float] = []
        self._newest: RequestOutput | None = None

    def add(self, output: RequestOutput, num_tokens: int) -> None:
        """Add so many of the tokens of an output, and what else it says about the request."""
        self._newest = output
        times = self._token_times_s
        for time_s in output.new_token_times_s[:num_tokens]:
            if times:
                self._observe_latency(time_s - times[-1])
            times.append(time_s)

    def finish(self, now_s: float, engine: RequestTiming | None) -> Timing:
        """Return the timing; `engine` is None when the gateway ended the request by itself."""
        times = self._token_times_s
        if engine is None:
            engine = self._measured_here(now_s)
        gaps = sorted(later - earlier for earlier, later in pairwise(times))
        return Timing(
            queue_s=round(engine.queue_s, DIGITS),
            prefill_s=round(engine.prefill_s, DIGITS),
            decode_s=round(engine.decode_s, DIGITS),
            ttft_s=None if engine.ttft_s is None else round(engine.ttft_s, DIGITS),
            e2e_s=round(engine.e2e_s, DIGITS),
            itl_mean_s=round(sum(gaps) / len(gaps), DIGITS) if gaps else None,
            itl_p50_s=_nearest_rank(gaps, 0.50),
            itl_p99_s=_nearest_rank(gaps, 0.99),
            itl_max_s=_nearest_rank(gaps, 1.00),
            num_preemptions=engine.num_preemptions,
        )

    def _measured_here(self, now_s: float) -> RequestTiming:
        times, newest = self._token_times_s, self._newest
        e2e_s = now_s - self._arrived_s
        queue_s = e2e_s if newest is None else newest.queue_s
        ttft_s = times[0] - self._arrived_s if times else None
        return RequestTiming(
            queue_s=queue_s,
            prefill_s=max(0.0, ttft_s - queue_s) if ttft_s is not None else 0.0,
            decode_s=times[-1] - times[0] if times else 0.0,
            ttft_s=ttft_s,
            e2e_s=e2e_s,
            num_cached_tokens=0,
            num_preemptions=0 if newest is None else newest.num_preemptions,
        )


def _nearest_rank(ordered: list[float], share: float) -> float | None:
    if not ordered:
        return None
    return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], DIGITS)
