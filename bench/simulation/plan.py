"""Which fleets are compared under which load: every combination of the choices, one run each."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.simulation.device import DeviceModel
from bench.simulation.figures import Figures, figures_of
from bench.simulation.fleet import Affinity, Fleet, simulate
from bench.simulation.router import RouterName
from bench.simulation.workload import WorkloadConfig, make_trace
from bench.summary import Goodput
from jaxengine.config import BatchingMode, EngineConfig, SchedulingPolicy

__all__ = ["Choices", "RunResult", "SimulationPlan", "run_plan", "variants_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One fleet under one load.

    Attributes:
        rate_per_replica: requests per second and replica; infinite: all at once.
    """

    num_replicas: int
    router: RouterName
    batching: BatchingMode
    scheduling_policy: SchedulingPolicy
    target_itl_s: float | None
    rate_per_replica: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """What is varied; at least one of each."""

    num_replicas: Sequence[int] = (1,)
    routers: Sequence[RouterName] = ("round-robin",)
    batching: Sequence[BatchingMode] = ("continuous",)
    scheduling_policies: Sequence[SchedulingPolicy] = ("fair",)
    target_itls_s: Sequence[float | None] = (None,)
    rates_per_replica: Sequence[float] = (1.0,)


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationPlan:
    """What is held fixed. The workload's rate is set by each variant."""

    workload: WorkloadConfig
    engine: EngineConfig
    device: DeviceModel
    affinity: Affinity = "session"
    goodput: Goodput | None = None
    num_processes: int = 1

    def workload_of(self, variant: Variant) -> WorkloadConfig:
        """The load of a variant: the more replicas, the more of it."""
        return replace(self.workload, request_rate=variant.rate_per_replica * variant.num_replicas)

    def fleet_of(self, variant: Variant) -> Fleet:
        """The fleet of a variant."""
        return Fleet(
            config=replace(
                self.engine,
                batching=variant.batching,
                scheduling_policy=variant.scheduling_policy,
                target_itl_s=variant.target_itl_s,
            ),
            device=self.device,
            num_replicas=variant.num_replicas,
            router=variant.router,
            affinity=self.affinity,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """One run.

    Attributes:
        name: what sets it apart from the others of its plan, rate excluded.
        exact_loads: false if the router had to guess the outstanding work of replicas.
        wall_s: how long simulating took.
        tokens_per_replica: tokens that each replica computed.
    """

    name: str
    variant: Variant
    figures: Figures
    exact_loads: bool
    wall_s: float
    tokens_per_replica: tuple[int, ...]


def variants_of(choices: Choices) -> list[Variant]:
    """Every combination; rates vary fastest."""
    return [
        Variant(
            num_replicas=num_replicas,
            router=router,
            batching=batching,
            scheduling_policy=policy,
            target_itl_s=target_itl_s,
            rate_per_replica=rate,
        )
        for num_replicas, router, batching, policy, target_itl_s, rate in itertools.product(
            choices.num_replicas,
            choices.routers,
            choices.batching,
            choices.scheduling_policies,
            choices.target_itls_s,
            choices.rates_per_replica,
        )
    ]


def run_plan(
    plan: SimulationPlan,
    choices: Choices,
    *,
    report: Callable[[RunResult], None] = lambda result: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[RunResult]:
    """Simulate every variant, one after the other; `report` hears of each as it is done."""
    results = []
    for variant in variants_of(choices):
        start_s = clock()
        trace = make_trace(plan.workload_of(variant))
        records = simulate(trace, plan.fleet_of(variant), num_processes=plan.num_processes)
        result = RunResult(
            name=name_of(variant, choices),
            variant=variant,
            figures=figures_of(trace, records, goodput=plan.goodput),
            exact_loads=plan.num_processes == 1 or not guesses_loads(variant),
            wall_s=clock() - start_s,
            tokens_per_replica=tuple(record.num_tokens for record in records),
        )
        report(result)
        results.append(result)
    return results


def guesses_loads(variant: Variant) -> bool:
    """Whether the router has to, where replicas are dealt out to processes."""
    return variant.num_replicas > 1 and variant.router != "round-robin"


def name_of(variant: Variant, choices: Choices) -> str:
    """The choices that differ between runs; how many replicas, if none does."""
    target = "no ITL target"
    if variant.target_itl_s is not None:
        target = f"ITL {1e3 * variant.target_itl_s:g} ms"
    replicas = f"{variant.num_replicas} replica" + "s" * (variant.num_replicas > 1)
    parts = [
        text
        for text, options in (
            (replicas, choices.num_replicas),
            (variant.router, choices.routers),
            (variant.batching, choices.batching),
            (variant.scheduling_policy, choices.scheduling_policies),
            (target, choices.target_itls_s),
        )
        if len(options) > 1
    ]
    return ", ".join(parts) or replicas
