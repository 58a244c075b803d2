"""Replicas behind a router, on one clock or dealt out to processes.

On one clock, the router knows the outstanding work of every replica at every arrival. Dealt out,
each process lives through its replicas one after the other, so all of the routing is done before:
exact for round robin; for the others the router goes by a guess (`DecayingLoads`).
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Literal

import numpy as np

from bench.simulation.device import DeviceModel, StepLoad
from bench.simulation.record import ReplicaRecord
from bench.simulation.replica import Arrival, Replica
from bench.simulation.router import DecayingLoads, RouterName, make_router
from bench.simulation.workload import Ints, Trace
from jaxengine.config import EngineConfig

__all__ = ["Affinity", "Fleet", "simulate", "simulate_closed_loop"]

# What prefix-affine routing takes for the key: the conversation, or the system prompt.
Affinity = Literal["session", "group"]

JOBS_PER_PROCESS = 4  # so that processes end at about the same time


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """Equal replicas behind a router."""

    config: EngineConfig
    device: DeviceModel
    num_replicas: int = 1
    router: RouterName = "round-robin"
    affinity: Affinity = "session"

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ValueError(f"{self.num_replicas=} must be at least 1")


def simulate(trace: Trace, fleet: Fleet, *, num_processes: int = 1) -> list[ReplicaRecord]:
    """Live through a trace until every request has ended.

    Returns:
        One record per replica.
    """
    if num_processes > 1 and fleet.num_replicas > 1:
        return simulate_apart(trace, fleet, num_processes)
    return simulate_together(trace, fleet)


def simulate_together(trace: Trace, fleet: Fleet) -> list[ReplicaRecord]:
    """All replicas on one clock."""
    router = make_router(fleet.router, fleet.num_replicas)
    loads = np.zeros(fleet.num_replicas)
    costs = routing_costs(trace)
    placed: dict[int, int] = {}

    def note_end(number: int, now_s: float) -> None:
        loads[placed.pop(number)] -= costs[number]

    replicas = [
        Replica(fleet.config, fleet.device, on_end=note_end) for _ in range(fleet.num_replicas)
    ]
    events: list[tuple[float, int]] = []  # one for each replica that has something to do
    for arrival, key in zip(arrivals(trace), routing_keys(trace, fleet), strict=True):
        run_events(replicas, events, arrival.arrival_s)
        chosen = router.choose(key, costs[arrival.number], loads)
        loads[chosen] += costs[arrival.number]
        placed[arrival.number] = chosen
        replica = replicas[chosen]
        event_s = replica.next_event_s
        replica.add(arrival, arrival.arrival_s)
        if replica.next_event_s != event_s:
            heapq.heappush(events, (replica.next_event_s, chosen))
    run_events(replicas, events, math.inf)
    return [replica.record for replica in replicas]


def run_events(replicas: Sequence[Replica], events: list[tuple[float, int]], end_s: float) -> None:
    """Live through everything that is due before `end_s`, over all replicas, in order."""
    while events and events[0][0] < end_s:
        event_s, chosen = events[0]
        replica = replicas[chosen]
        if event_s == replica.next_event_s:  # else an earlier event has replaced it
            replica.wake()
            if replica.next_event_s < math.inf:
                heapq.heapreplace(events, (replica.next_event_s, chosen))
                continue
        heapq.heappop(events)


def simulate_apart(trace: Trace, fleet: Fleet, num_processes: int) -> list[ReplicaRecord]:
    """Route everything, then let processes live through the replicas."""
    placed = route_ahead(trace, fleet)
    order = np.argsort(placed, kind="stable")
    bounds = np.searchsorted(placed[order], np.arange(fleet.num_replicas + 1))
    shares = [order[bounds[n] : bounds[n + 1]] for n in range(fleet.num_replicas)]
    num_jobs = min(num_processes * JOBS_PER_PROCESS, fleet.num_replicas)
    jobs = [range(job, fleet.num_replicas, num_jobs) for job in range(num_jobs)]
    records: dict[int, ReplicaRecord] = {}
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        results = [
            pool.submit(run_alone, fleet, [(shares[n], trace.take(shares[n])) for n in job])
            for job in jobs
        ]
        for job, result in zip(jobs, results, strict=True):
            records |= zip(job, result.result(), strict=True)
    return [records[number] for number in range(fleet.num_replicas)]


def run_alone(fleet: Fleet, shares: Sequence[tuple[Ints, Trace]]) -> list[ReplicaRecord]:
    """Live through some replicas, one after the other.

    Args:
        fleet: what they are.
        shares: for each, which requests it gets: their indices, and the requests.
    """
    records = []
    for indices, trace in shares:
        replica = Replica(fleet.config, fleet.device)
        for arrival in arrivals(trace, indices):
            replica.run_until(arrival.arrival_s)
            replica.add(arrival, arrival.arrival_s)
        replica.run_until(math.inf)
        records.append(replica.record)
    return records


def simulate_closed_loop(trace: Trace, fleet: Fleet, concurrency: int) -> ReplicaRecord:
    """One replica that always has so many requests, whatever the arrivals of the trace say."""
    waiting = arrivals(trace)

    def send_next(_number: int, now_s: float) -> None:
        arrival = next(waiting, None)
        if arrival is not None:
            replica.add(arrival, now_s)

    replica = Replica(fleet.config, fleet.device, on_end=send_next)
    for _ in range(concurrency):
        send_next(-1, 0.0)
    replica.run_until(math.inf)
    return replica.record


def route_ahead(trace: Trace, fleet: Fleet) -> Ints:
    """The replica of each request, by a router that hears of no completion."""
    router = make_router(fleet.router, fleet.num_replicas)
    loads = DecayingLoads(fleet.num_replicas, residence_s(trace, fleet))
    costs = routing_costs(trace)
    placed = np.empty(len(trace), dtype=np.int64)
    times_s = trace.arrival_s.tolist()
    for index, key in enumerate(routing_keys(trace, fleet)):
        loads.advance(times_s[index])
        number = router.choose(key, costs[index], loads.values)
        loads.add(number, costs[index])
        placed[index] = number
    return placed


def residence_s(trace: Trace, fleet: Fleet) -> float:
    """How long a request stays in a replica that is half full."""
    num_seqs = max(1, fleet.config.max_num_seqs // 2)
    output_len = float(trace.output_len.mean())
    context = int(num_seqs * (trace.prompt_len.mean() + output_len / 2))
    return output_len * fleet.device.step_s(StepLoad(num_seqs, True, num_seqs, context, 0))


def routing_costs(trace: Trace) -> list[float]:
    """What a router takes each request for."""
    costs: list[float] = (trace.prompt_len + trace.output_len.mean()).tolist()
    return costs


def routing_keys(trace: Trace, fleet: Fleet) -> list[int]:
    """What prefix-affine routing goes by."""
    keys: list[int] = (trace.session if fleet.affinity == "session" else trace.group).tolist()
    return keys


def arrivals(trace: Trace, indices: Ints | None = None) -> Iterator[Arrival]:
    """The requests one by one, numbered from 0 unless told otherwise."""
    numbers = range(len(trace)) if indices is None else indices.tolist()
    columns = (column.tolist() for column in trace.columns)
    return map(Arrival, numbers, *columns)
