"""The highest rate of arrivals at which a server keeps a latency objective.

Probes at one rate after another: from a start upwards or downwards until one holds and its
neighbour does not, then between the two. Downwards matters: a static server misses an objective at
low rates too, where batches take long to fill, so the first rate that holds is the highest one.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from bench.load import run_open_loop
from bench.scenario import PlannedRequest, Sender
from bench.stream import RequestRecord
from bench.summary import LoadLevel, summarize

__all__ = ["Objective", "Probe", "find_highest_rate", "highest_rate", "probe_rate"]

NAMES = ("ttft_p99", "itl_p99")
SHARE = 0.99
STEP = math.sqrt(2)  # between the rates of the first pass
MAX_STEPS = 10
NUM_BISECTIONS = 3  # leaves the answer known to 4 %
WATCH_INTERVAL_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """Bounds on 99th percentiles, in milliseconds; None sets no bound."""

    ttft_p99_ms: float | None = None
    itl_p99_ms: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Objective":
        """From "ttft_p99=2000,itl_p99=200".

        Raises:
            ValueError: an unknown name, or no positive number.
        """
        bounds: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in NAMES:
                raise ValueError(f"{part.strip()!r} must be ttft_p99=MS or itl_p99=MS")
            try:
                bounds[f"{name}_ms"] = float(value)
            except ValueError:
                raise ValueError(f"{part.strip()!r} has no number of milliseconds") from None
            if not 0 < bounds[f"{name}_ms"] < math.inf:
                raise ValueError(f"{part.strip()!r} must be positive")
        return cls(**bounds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What was seen at one rate.

    Attributes:
        rate: arrivals per second.
        num_requests: planned; fewer were sent when it ended early.
        ttft_p99_ms, itl_p99_ms: of the answers that came.
        num_failed: requests that ended in an error.
        ended_early: whether it was stopped because the objective could no longer be kept.
        holds: whether the objective was kept.
    """

    rate: float
    num_requests: int
    ttft_p99_ms: float | None
    itl_p99_ms: float | None
    num_failed: int
    ended_early: bool
    holds: bool


async def probe_rate(
    sender: Sender, planned: Sequence[PlannedRequest], rate: float, objective: Objective
) -> Probe:
    """Send requests as they are due, and stop once too many have waited too long.

    Args:
        sender: to the server, which is idle before and after.
        planned: the requests, with their arrivals at this rate.
        rate: for the record.
        objective: to be kept.
    """
    records: list[RequestRecord] = []

    async def send_one(record: RequestRecord) -> None:
        records.append(record)
        await sender.send(planned[record.index], record)

    arrivals_s = [request.arrival_s for request in planned]
    load = asyncio.ensure_future(
        run_open_loop(send_one, range(len(planned)), arrivals_s, clock=sender.clock)
    )
    ended_early = False
    while not load.done():
        await asyncio.wait({load}, timeout=WATCH_INTERVAL_S)
        if not load.done() and is_missed(records, sender.clock(), len(planned), objective):
            ended_early = load.cancel()
            await asyncio.wait({load})
    if not ended_early:
        load.result()  # an error of ours is raised here
    await sender.wait_until_idle()
    ended = [record for record in records if record.end_s is not None]
    if not ended:
        return Probe(
            rate=rate,
            num_requests=len(planned),
            ttft_p99_ms=None,
            itl_p99_ms=None,
            num_failed=0,
            ended_early=ended_early,
            holds=False,
        )
    summary = summarize(LoadLevel(request_rate=rate), ended, output_len=None, client_cpu_s=0.0)
    ttft_p99_ms = summary.ttft_ms.p99 if summary.ttft_ms else None
    itl_p99_ms = summary.itl_ms.p99 if summary.itl_ms else None
    return Probe(
        rate=rate,
        num_requests=len(planned),
        ttft_p99_ms=ttft_p99_ms,
        itl_p99_ms=itl_p99_ms,
        num_failed=summary.num_failed,
        ended_early=ended_early,
        holds=not ended_early
        and not summary.num_failed
        and keeps(ttft_p99_ms, objective.ttft_p99_ms)
        and keeps(itl_p99_ms, objective.itl_p99_ms),
    )


def keeps(measured_ms: float | None, bound_ms: float | None) -> bool:
    """Whether a percentile is within its bound; where there were no values, none was exceeded."""
    return bound_ms is None or measured_ms is None or measured_ms <= bound_ms


def is_missed(
    records: Sequence[RequestRecord], now_s: float, num_requests: int, objective: Objective
) -> bool:
    """Whether the objective can no longer be kept, whatever the rest will do.

    A request has failed (and a static batch that lacks it may never start), or so many have waited
    too long that the 99th percentile of all must have.
    """
    if any(record.error is not None for record in records):
        return True
    if objective.ttft_p99_ms is None:
        return False
    bound_s = objective.ttft_p99_ms / 1e3
    num_late = sum(
        (now_s - record.start_s if record.first_token_s is None else record.first_token_s) > bound_s
        for record in records
    )
    # The percentile lies at or above this rank, counted from 0; from there on all would be late.
    rank = math.floor(SHARE * (num_requests - 1))
    return num_late >= num_requests - rank


async def find_highest_rate(
    probe: Callable[[float], Awaitable[Probe]], start_rate: float
) -> list[Probe]:
    """Probe rates until the highest that holds is known to a few percent.

    Args:
        probe: measures one rate.
        start_rate: where to begin, near what the server can bear at most.

    Returns:
        All probes, in order.
    """
    probes: list[Probe] = []
    held: float | None = None
    missed: float | None = None
    rate = start_rate
    for _ in range(MAX_STEPS):
        probes.append(await probe(rate))
        if probes[-1].holds:
            held, rate = rate, rate * STEP
        else:
            missed, rate = rate, rate / STEP
        if held is not None and missed is not None:
            break
    if held is None or missed is None:
        return probes
    for _ in range(NUM_BISECTIONS):
        rate = math.sqrt(held * missed)
        probes.append(await probe(rate))
        held, missed = (rate, missed) if probes[-1].holds else (held, rate)
    return probes


def highest_rate(probes: Sequence[Probe]) -> float | None:
    """The highest rate that held; None if none did."""
    return max((probe.rate for probe in probes if probe.holds), default=None)
