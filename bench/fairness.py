"""`headrace bench fairness`: light tenants beside one that floods the server.

Nine light tenants send small requests now and then, alone and beside a tenant that keeps many
requests in flight; beside it under --scheduling-policy fair and under fcfs.
"""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import click

from bench.fairness_figures import (
    FLOOD,
    HEADINGS,
    POLICIES,
    FairnessRun,
    Policy,
    fairness_row,
    summarize_fairness,
)
from bench.own_server import BenchSetup, measuring_command
from bench.report import print_rows
from bench.scenario import PlannedRequest, Sender, plan_prompts
from bench.stream import RequestFailed, RequestRecord
from bench.summary import Distribution
from bench.verdict import print_verdicts
from bench.windows import output_tokens_between, prompts_between
from bench.workload import arrival_times

__all__ = ["fairness"]

INDEX_STRIDE = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class FairnessPlan:
    """Who sends what.

    Attributes:
        num_light: light tenants.
        light_rate: of each, in requests per second: Poisson.
        light_input_len, light_output_len: of their requests.
        flood_streams: requests that the flooding tenant keeps in flight.
        flood_input_len, flood_output_len: of its requests.
        duration_s: the window, in which the light ones arrive.
        settle_s: the flood runs for so long before.
    """

    num_light: int
    light_rate: float
    light_input_len: int
    light_output_len: int
    flood_streams: int
    flood_input_len: int
    flood_output_len: int
    duration_s: float
    settle_s: float
    seed: int
    vocab_size: int

    def light_requests(self, part: int) -> list[PlannedRequest]:
        """What the light tenants send within the window; the same times for every part."""
        arrivals = []
        for number in range(self.num_light):
            times = arrival_times(self.light_rate, 1.0, self.seed * self.num_light + number)
            next(times)  # that at 0: the tenants do not begin all at once
            within = itertools.takewhile(lambda now_s: now_s < self.duration_s, times)
            arrivals += [(now_s, f"light-{number + 1}") for now_s in within]
        prompts = self.prompts(self.light_input_len, len(arrivals), part * INDEX_STRIDE)
        return [
            PlannedRequest(
                prompt=prompt,
                output_len=self.light_output_len,
                arrival_s=arrival_s,
                tenant=tenant,
            )
            for prompt, (arrival_s, tenant) in zip(prompts, sorted(arrivals), strict=True)
        ]

    def flood_request(self, index: int) -> PlannedRequest:
        """Request number `index` of the flooding tenant."""
        (prompt,) = self.prompts(self.flood_input_len, 1, -1 - index)
        return PlannedRequest(prompt=prompt, output_len=self.flood_output_len, tenant=FLOOD)

    def prompts(self, input_len: int, count: int, first_index: int) -> Sequence[list[int] | str]:
        """Prompts of one length."""
        return plan_prompts(
            [input_len] * count,
            seed=self.seed,
            vocab_size=self.vocab_size,
            first_index=first_index,
        )


async def run_load(
    sender: Sender, plan: FairnessPlan, policy: Policy, part: int, *, flooded: bool
) -> tuple[FairnessRun, list[RequestRecord]]:
    """The light tenants for a window, with or without the flood.

    Returns:
        The run, and every record.
    """
    light = plan.light_requests(part)
    streams = plan.flood_streams if flooded else 0
    offset = part * INDEX_STRIDE
    async with sender.kept_busy(
        lambda index: plan.flood_request(offset + index), streams
    ) as flood_records:
        if flooded:
            await asyncio.sleep(plan.settle_s)
        start_s = sender.clock()
        light_records = await sender.send_all(light)
        end_s = start_s + plan.duration_s
        await asyncio.sleep(max(0.0, end_s - sender.clock()))
    await sender.wait_until_idle()
    ttft_ms = Distribution.of_seconds(
        record.first_token_s for record in light_records if record.first_token_s is not None
    )
    if ttft_ms is None:
        raise RequestFailed("no answer", "to any light tenant; is the duration too short?")

    def served(records: Sequence[RequestRecord], input_len: int) -> float:
        num_prompts = len(prompts_between(records, start_s, end_s))
        return num_prompts * input_len + output_tokens_between(records, start_s, end_s)

    tenants = sorted({request.tenant or "" for request in light})
    by_tenant = {
        tenant: [record for record in light_records if light[record.index].tenant == tenant]
        for tenant in tenants
    }
    service = {
        tenant: served(records, plan.light_input_len) for tenant, records in by_tenant.items()
    }
    if flooded:
        service[FLOOD] = served(flood_records, plan.flood_input_len)
    run = FairnessRun(
        policy=policy,
        flooded=flooded,
        light_ttft_ms=ttft_ms,
        service=service,
        demand={
            tenant: float(len(records) * (plan.light_input_len + plan.light_output_len))
            for tenant, records in by_tenant.items()
        },
        duration_s=plan.duration_s,
    )
    return run, [*light_records, *flood_records]


async def run_policy(
    sender: Sender, plan: FairnessPlan, policy: Policy
) -> tuple[list[FairnessRun], list[RequestRecord]]:
    """The runs on one server: under the fair policy also the light tenants alone."""
    await sender.warm_up(plan.light_requests(0)[:8])
    runs, records = [], []
    for part, flooded in enumerate((False, True) if policy == "fair" else (True,), start=1):
        run, seen = await run_load(sender, plan, policy, part, flooded=flooded)
        runs.append(run)
        records += seen
    return runs, records


@measuring_command(
    quick={
        "light_rate": 2.0,
        "flood_streams": 8,
        "duration_s": 3.0,
        "settle_s": 0.5,
        "rounds": 1,
        "batch_size": 4,
        "light_input_len": 8,
        "light_output_len": 4,
        "flood_input_len": 16,
        "flood_output_len": 8,
    }
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Rows of the engine: its --max-num-seqs.",
)
@click.option("--num-light", type=click.IntRange(1), default=9, show_default=True)
@click.option(
    "--light-rate",
    type=click.FloatRange(min=0, min_open=True),
    default=0.15,
    show_default=True,
    help="Requests per second of each light tenant.",
)
@click.option("--light-input-len", type=click.IntRange(1), default=32, show_default=True)
@click.option("--light-output-len", type=click.IntRange(1), default=16, show_default=True)
@click.option(
    "--flood-streams",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Requests that the flooding tenant keeps in flight.",
)
@click.option("--flood-input-len", type=click.IntRange(1), default=64, show_default=True)
@click.option("--flood-output-len", type=click.IntRange(1), default=64, show_default=True)
@click.option(
    "--duration",
    "duration_s",
    type=float,
    default=90.0,
    show_default=True,
    help="Seconds of each run.",
)
@click.option(
    "--settle",
    "settle_s",
    type=float,
    default=15.0,
    show_default=True,
    help="Seconds that the flood runs before.",
)
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True)
def fairness(
    setup: BenchSetup,
    *,
    batch_size: int,
    rounds: int,
    num_light: int,
    light_rate: float,
    light_input_len: int,
    light_output_len: int,
    flood_streams: int,
    flood_input_len: int,
    flood_output_len: int,
    duration_s: float,
    settle_s: float,
) -> None:
    """Measure light tenants beside one that floods, under fair and fcfs scheduling.

    Service is tokens within the window; Jain's index is over service relative to the max-min fair
    share of all service. SERVE_ARGUMENTS go to both servers.
    """
    plan = FairnessPlan(
        num_light=num_light,
        light_rate=light_rate,
        light_input_len=light_input_len,
        light_output_len=light_output_len,
        flood_streams=flood_streams,
        flood_input_len=flood_input_len,
        flood_output_len=flood_output_len,
        duration_s=duration_s,
        settle_s=settle_s,
        seed=setup.seed,
        vocab_size=setup.vocab_size,
    )
    runs: list[FairnessRun] = []
    for round_number in range(rounds):
        for policy in POLICIES if round_number % 2 == 0 else reversed(POLICIES):
            found, records = setup.measure(
                ["--scheduling-policy", policy, "--max-num-seqs", str(batch_size)],
                partial(run_policy, plan=plan, policy=policy),
            )
            setup.check(records)
            runs += found
    figures = summarize_fairness(runs)
    print_rows(
        setup.console,
        HEADINGS,
        [fairness_row(run, figures.alone_p99_ms) for run in runs],
        title=f"{num_light} light tenants and one with {flood_streams} streams",
    )
    verdicts = figures.verdicts()
    print_verdicts(setup.console, verdicts)
    setup.finish(
        {**asdict(plan), "batch_size": batch_size, "rounds": rounds},
        {
            "runs": [
                {**asdict(run), "jain_index": run.jain_index, "tokens_per_s": run.tokens_per_s}
                for run in runs
            ],
            "figures": asdict(figures),
            "verdicts": [asdict(verdict) for verdict in verdicts],
        },
    )
