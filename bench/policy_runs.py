"""The servers and requests of the comparison of batching policies."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from bench.lengths import LengthKind
from bench.objective import Objective, Probe, find_highest_rate, probe_rate
from bench.own_server import BenchSetup
from bench.policy_plan import PolicyPlan
from bench.policy_results import MODES, Mode, PolicyRun
from bench.scenario import Sender
from bench.stream import RequestFailed
from bench.summary import LoadLevel

__all__ = ["RateSearch", "measure_rounds", "search_rates"]

WARMUP_PART = 0
MIN_QUEUE = 1024


def measure_rounds(setup: BenchSetup, plan: PolicyPlan, rounds: int) -> list[PolicyRun]:
    """Send every workload through every mode, `rounds` times, each time to a new server."""
    rates: dict[LengthKind, float] = (
        {} if plan.request_rate is None else dict.fromkeys(plan.lengths, plan.request_rate)
    )
    runs: list[PolicyRun] = []
    for round_number in range(rounds):
        for mode in rotated(MODES, round_number):
            work = partial(
                run_workloads,
                plan=plan,
                mode=mode,
                round_number=round_number,
                rates=rates,
                progress=setup.progress,
            )
            found = setup.measure(server_flags(mode, plan), work)
            setup.check(record for run in found for record in run.run.records)
            runs += found
    return runs


def server_flags(mode: Mode, plan: PolicyPlan) -> list[str]:
    """What sets the servers apart, and what they have in common: rows, and room for a burst."""
    return [
        *("--batching", mode),
        *("--max-num-seqs", str(plan.batch_size)),
        *("--max-num-queued-reqs", str(max(MIN_QUEUE, plan.num_requests))),
        *("--queue-timeout", "0"),  # a static server keeps some waiting for minutes
    ]


def rotated(modes: Sequence[Mode], offset: int) -> list[Mode]:
    """The modes, beginning with another one each round; the first round begins with the first."""
    offset %= len(modes)
    return [*modes[offset:], *modes[:offset]]


async def run_workloads(
    sender: Sender,
    plan: PolicyPlan,
    mode: Mode,
    round_number: int,
    rates: dict[LengthKind, float],
    progress: Console,
) -> list[PolicyRun]:
    """All workloads on one server.

    Args:
        sender: to a server of this mode.
        plan: the workloads.
        mode: for the record.
        round_number: likewise.
        rates: of the Poisson arrivals by output lengths; one that is missing is set here, from
            the burst of the same lengths before.
        progress: for a line per workload.
    """
    await sender.warm_up(plan.warmup(WARMUP_PART))
    runs = []
    for part, workload in enumerate(plan.workloads(), start=WARMUP_PART + 1):
        rate = None if workload.arrivals == "burst" else rates[workload.lengths]
        requests = plan.requests(workload.lengths, rate=rate, part=part)
        run = await sender.measure(requests, LoadLevel(request_rate=rate))
        progress.print(
            f"  {mode}, {workload.name}: {run.summary.output_tokens_per_s:.1f} output tok/s "
            f"in {run.summary.duration_s:.0f} s"
        )
        if rate is None:
            if not run.summary.requests_per_s:
                raise RequestFailed("no answer", f"in the burst: {run.summary.error_example}")
            share = plan.load_share * run.summary.requests_per_s
            rates.setdefault(workload.lengths, plan.request_rate or share)
        runs.append(PolicyRun(mode, workload, rate, round_number, run))
    return runs


@dataclass(frozen=True, kw_only=True, slots=True)
class RateSearch:
    """How the highest rate is looked for.

    Attributes:
        objective: to be kept.
        probe_seconds: a probe has arrivals for so long, and for three times the bound on TTFT.
        probe_batches: and at least so many full batches.
    """

    objective: Objective
    probe_seconds: float
    probe_batches: int


def search_rates(
    setup: BenchSetup, plan: PolicyPlan, search: RateSearch, start_rate: float
) -> dict[Mode, list[Probe]]:
    """Find for each mode, on a server of its own, the highest rate that keeps the objective.

    Args:
        setup: starts the servers.
        plan: of the requests; their outputs have its last lengths.
        search: what to look for.
        start_rate: of the first probe of each mode. Too much for any of them, at best: a static
            server keeps an objective only between the rate at which its batches fill in time and
            the one that it can bear, and a search that begins below finds no rate at all.

    Returns:
        What was tried.
    """
    return {
        mode: setup.measure(
            server_flags(mode, plan),
            partial(
                search_rate,
                plan=plan,
                search=search,
                start_rate=start_rate,
                progress=setup.progress,
            ),
        )
        for mode in MODES
    }


async def search_rate(
    sender: Sender, plan: PolicyPlan, search: RateSearch, start_rate: float, progress: Console
) -> list[Probe]:
    """The search on one server."""
    await sender.warm_up(plan.warmup(WARMUP_PART))
    seconds = max(search.probe_seconds, 3e-3 * (search.objective.ttft_p99_ms or 0.0))
    part = WARMUP_PART

    async def probe(rate: float) -> Probe:
        nonlocal part
        part += 1
        count = plan.probe_count(rate, seconds, search.probe_batches)
        requests = plan.requests(plan.lengths[-1], rate=rate, part=part, count=count)
        found = await probe_rate(sender, requests, rate, search.objective)
        progress.print(f"  {rate:.3f} req/s {'holds' if found.holds else 'does not hold'}")
        return found

    return await find_highest_rate(probe, start_rate)
