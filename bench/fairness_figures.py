"""What the measurement of fairness found, and what fair means there.

Service is tokens, of prompts done and of output, that came within the window. A tenant is entitled
to its max-min fair share of all the service that was given: whoever asks for less than an equal
part gets what it asks for, the others share the rest. Jain's index over (service / entitlement)
is 1 when all got what they were entitled to, and 1/n when one of n got everything.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from bench.report import milliseconds
from bench.summary import Distribution
from bench.verdict import Verdict, judge

__all__ = [
    "FLOOD",
    "HEADINGS",
    "POLICIES",
    "FairnessRun",
    "Policy",
    "fairness_row",
    "summarize_fairness",
]

Policy = Literal["fair", "fcfs"]
POLICIES: tuple[Policy, ...] = ("fair", "fcfs")

FLOOD = "flood"

MAX_TTFT_RATIO = 1.5
MIN_JAIN_INDEX = 0.95
MIN_THROUGHPUT_RATIO = 0.97

HEADINGS = (
    *("run", "light TTFT ms\np50/p99", "p99 over\nalone", "Jain\nindex", "all\ntok/s"),
    *("flood\ntok/s", "light\ntok/s"),
)


def max_min_shares(demands: Mapping[str, float], capacity: float) -> dict[str, float]:
    """Divide a capacity so that nobody could get more without someone poorer getting less.

    Args:
        demands: no one gets more than this; infinite for those who take whatever there is.
        capacity: to divide; what nobody demands stays.
    """
    shares = {}
    left, num_left = capacity, len(demands)
    for name, demand in sorted(demands.items(), key=lambda item: item[1]):
        shares[name] = min(demand, left / num_left)
        left, num_left = left - shares[name], num_left - 1
    return shares


def jain_index(values: Iterable[float]) -> float | None:
    """(sum of x)^2 / (n * sum of x^2): 1 if all are equal, 1/n if only one is not zero."""
    known = list(values)
    squares = sum(value * value for value in known)
    return sum(known) ** 2 / (len(known) * squares) if squares else None


@dataclass(frozen=True, kw_only=True, slots=True)
class FairnessRun:
    """One run.

    Attributes:
        policy: of the server.
        flooded: whether the flooding tenant was there.
        light_ttft_ms: of all requests of the light tenants.
        service: tokens that each tenant got within the window.
        demand: tokens that each light tenant asked for within it.
        duration_s: of the window.
    """

    policy: Policy
    flooded: bool
    light_ttft_ms: Distribution
    service: dict[str, float]
    demand: dict[str, float]
    duration_s: float

    @property
    def tokens_per_s(self) -> float:
        """Of all tenants together."""
        return sum(self.service.values()) / self.duration_s

    @property
    def jain_index(self) -> float | None:
        """Of service over entitlement."""
        demands = {**self.demand, **({FLOOD: float("inf")} if self.flooded else {})}
        entitled = max_min_shares(demands, sum(self.service.values()))
        return jain_index(
            self.service.get(tenant, 0.0) / share for tenant, share in entitled.items() if share
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FairnessFigures:
    """Medians over the rounds.

    Attributes:
        alone_p99_ms: P99 TTFT of the light tenants without the flood.
        ttft_ratios: with it over without, by policy.
        jain_indices: with it, by policy.
        throughput_ratio: all tokens per second under fair over fcfs, with it.
    """

    alone_p99_ms: float
    ttft_ratios: dict[str, float]
    jain_indices: dict[str, float | None]
    throughput_ratio: float

    def verdicts(self) -> list[Verdict]:
        return [
            judge(
                f"P99 TTFT of light tenants beside the flood at most {MAX_TTFT_RATIO:g} times "
                "what it is alone",
                self.ttft_ratios["fair"],
                most=MAX_TTFT_RATIO,
            ),
            judge(
                f"Jain index at least {MIN_JAIN_INDEX:g}",
                self.jain_indices["fair"],
                least=MIN_JAIN_INDEX,
            ),
            judge(
                f"throughput at least {MIN_THROUGHPUT_RATIO:.0%} of first-come-first-served",
                self.throughput_ratio,
                least=MIN_THROUGHPUT_RATIO,
            ),
        ]


def summarize_fairness(runs: Sequence[FairnessRun]) -> FairnessFigures:
    """The figures of all rounds."""

    def of(policy: Policy, *, flooded: bool) -> list[FairnessRun]:
        return [run for run in runs if (run.policy, run.flooded) == (policy, flooded)]

    alone = of("fair", flooded=False)
    beside = {policy: of(policy, flooded=True) for policy in POLICIES}
    return FairnessFigures(
        alone_p99_ms=median(run.light_ttft_ms.p99 for run in alone),
        ttft_ratios={
            policy: median(
                run.light_ttft_ms.p99 / base.light_ttft_ms.p99
                for run, base in zip(found, alone, strict=True)
            )
            for policy, found in beside.items()
        },
        jain_indices={
            policy: median(run.jain_index or 0.0 for run in found)
            for policy, found in beside.items()
        },
        throughput_ratio=median(
            fair.tokens_per_s / fcfs.tokens_per_s if fcfs.tokens_per_s else float("nan")
            for fair, fcfs in zip(beside["fair"], beside["fcfs"], strict=True)
        ),
    )


def fairness_row(run: FairnessRun, alone_p99_ms: float) -> list[str]:
    """For the table of HEADINGS."""
    index = run.jain_index
    flood = run.service.get(FLOOD, 0.0) / run.duration_s
    return [
        f"{run.policy}, {'beside the flood' if run.flooded else 'alone'}",
        milliseconds(run.light_ttft_ms, "p50", "p99"),
        f"{run.light_ttft_ms.p99 / alone_p99_ms:.2f}x",
        "-" if index is None else f"{index:.3f}",
        f"{run.tokens_per_s:.1f}",
        f"{flood:.1f}",
        f"{run.tokens_per_s - flood:.1f}",
    ]
