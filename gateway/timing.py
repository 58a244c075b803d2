"""Where the time of one generation went."""

import math
from dataclasses import dataclass
from itertools import pairwise

from jaxengine.outputs import RequestOutput, RequestTiming

__all__ = ["TimeKeeper", "Timing"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds, as in jaxengine.outputs.RequestTiming, plus inter-token latencies.

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
    """

    def __init__(self, arrived_s: float) -> None:
        self._arrived_s = arrived_s
        self._token_times_s: list[float] = []
        self._queue_s: float | None = None
        self._num_preemptions = 0

    def note(self, output: RequestOutput) -> None:
        """Take over what the engine says about the request so far."""
        self._queue_s = output.queue_s
        self._num_preemptions = output.num_preemptions

    def add_token(self, time_s: float) -> float | None:
        """Add a token; return the time since the one before it, if there is one."""
        times = self._token_times_s
        times.append(time_s)
        return times[-1] - times[-2] if len(times) > 1 else None

    def finish(self, now_s: float, engine: RequestTiming | None) -> Timing:
        """Return the timing; `engine` is None when the gateway ended the request by itself."""
        times = self._token_times_s
        if engine is None:
            engine = self._measured_here(now_s)
        gaps = sorted(later - earlier for earlier, later in pairwise(times))
        return Timing(
            queue_s=engine.queue_s,
            prefill_s=engine.prefill_s,
            decode_s=engine.decode_s,
            ttft_s=engine.ttft_s,
            e2e_s=engine.e2e_s,
            itl_mean_s=sum(gaps) / len(gaps) if gaps else None,
            itl_p50_s=_nearest_rank(gaps, 0.50),
            itl_p99_s=_nearest_rank(gaps, 0.99),
            itl_max_s=gaps[-1] if gaps else None,
            num_preemptions=engine.num_preemptions,
        )

    def _measured_here(self, now_s: float) -> RequestTiming:
        times = self._token_times_s
        e2e_s = now_s - self._arrived_s
        queue_s = e2e_s if self._queue_s is None else self._queue_s
        ttft_s = times[0] - self._arrived_s if times else None
        return RequestTiming(
            queue_s=queue_s,
            prefill_s=max(0.0, ttft_s - queue_s) if ttft_s is not None else 0.0,
            decode_s=times[-1] - times[0] if times else 0.0,
            ttft_s=ttft_s,
            e2e_s=e2e_s,
            num_cached_tokens=0,
            num_preemptions=self._num_preemptions,
        )


def _nearest_rank(ordered: list[float], share: float) -> float | None:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None
