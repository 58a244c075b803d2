"""A recorded run, and the same requests on a simulated device: do they take as long?"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bench.simulation.fleet import Fleet, simulate, simulate_closed_loop
from bench.simulation.record import ReplicaRecord
from bench.simulation.step_file import RecordedStep
from bench.simulation.workload import Trace

__all__ = ["Comparison", "RunFigures", "compare", "trace_from_steps"]

ACCEPTED_ERROR = 0.15


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFigures:
    """What a run came to, measured or simulated."""

    duration_s: float
    output_tokens_per_s: float
    num_steps: int
    mean_step_ms: float
    mean_itl_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A run and its simulation.

    Attributes:
        concurrency: requests in flight; None if requests came when the recording says.
    """

    num_requests: int
    output_tokens: int
    concurrency: int | None
    measured: RunFigures
    simulated: RunFigures

    @property
    def throughput_error(self) -> float:
        """By how much the simulation is faster (or, below zero, slower) than what it simulates."""
        return self.simulated.output_tokens_per_s / self.measured.output_tokens_per_s - 1

    @property
    def holds(self) -> bool:
        """Whether the throughput is as foretold, within 15 percent."""
        return abs(self.throughput_error) <= ACCEPTED_ERROR

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"throughput_error": self.throughput_error, "holds": self.holds}


def compare(
    steps: Sequence[RecordedStep], fleet: Fleet, *, concurrency: int | None = None
) -> Comparison:
    """Simulate what was recorded.

    Args:
        steps: the recording, in order; requests that began before it are left out of both.
        fleet: one replica, configured as the recorded server.
        concurrency: the recording is of a closed loop with so many requests in flight: the next
            is sent when one ends. Otherwise requests arrive when they were first scheduled.
    """
    trace = trace_from_steps(steps)
    if concurrency is None:
        (record,) = simulate(trace, fleet)
    else:
        record = simulate_closed_loop(trace, fleet, concurrency)
    output_tokens = int(trace.output_len.sum())
    return Comparison(
        num_requests=len(trace),
        output_tokens=output_tokens,
        concurrency=concurrency,
        measured=measured_figures(steps, output_tokens),
        simulated=simulated_figures(record, output_tokens),
    )


def trace_from_steps(steps: Sequence[RecordedStep]) -> Trace:
    """The requests of a recording: lengths, cached beginnings, and when each was first scheduled.

    Raises:
        ValueError: no request began within it.
    """
    first_s = steps[0].scheduled_s
    begun_before = {
        share.request_id
        for share in steps[0].shares
        if share.first_position > 0 and share.num_tokens == 1
    }
    arrival_s: dict[str, float] = {}
    prefix_len: dict[str, int] = {}
    prompt_len: dict[str, int] = {}
    output_len: dict[str, int] = {}
    for step in steps:
        for share in step.shares:
            name = share.request_id
            if name in begun_before:
                continue
            arrival_s.setdefault(name, step.scheduled_s - first_s)
            prefix_len.setdefault(name, share.first_position)
            if share.samples:
                prompt_len.setdefault(name, share.end)
                output_len[name] = output_len.get(name, 0) + 1
    names = [name for name in arrival_s if name in prompt_len]
    if not names:
        raise ValueError("no request begins within the recording")
    zeros = np.zeros(len(names), dtype=np.int64)
    return Trace(
        arrival_s=np.array([arrival_s[name] for name in names]),
        prompt_len=np.array([prompt_len[name] for name in names]),
        output_len=np.array([output_len[name] for name in names]),
        prefix_len=np.array([prefix_len[name] for name in names]),
        group=zeros,
        session=np.arange(len(names)),
        tenant=zeros,
        priority=zeros,
    )


def measured_figures(steps: Sequence[RecordedStep], output_tokens: int) -> RunFigures:
    """What was measured."""
    duration_s = steps[-1].end_s - steps[0].scheduled_s
    last_s: dict[str, float] = {}
    gaps_s = []
    for step in steps:
        for share in step.shares:
            if share.samples:
                if share.request_id in last_s:
                    gaps_s.append(step.end_s - last_s[share.request_id])
                last_s[share.request_id] = step.end_s
    return RunFigures(
        duration_s=duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        num_steps=len(steps),
        mean_step_ms=1e3 * float(np.mean([step.duration_s for step in steps])),
        mean_itl_ms=1e3 * float(np.mean(gaps_s)) if gaps_s else 0.0,
    )


def simulated_figures(record: ReplicaRecord, output_tokens: int) -> RunFigures:
    """The same of a simulation."""
    gaps = record.gaps.distribution()
    return RunFigures(
        duration_s=record.end_s,
        output_tokens_per_s=output_tokens / record.end_s,
        num_steps=record.num_steps,
        mean_step_ms=1e3 * record.busy_s / record.num_steps,
        mean_itl_ms=0.0 if gaps is None else gaps.mean,
    )
