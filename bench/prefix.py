"""`headrace bench prefix`: what prefix caching costs when nothing hits, and gains when most does.

The cost: the same load of prompts that have nothing in common, with caching on and off, by turns.
The gain: one request at a time, by turns a new prompt and one whose beginning is cached.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean, median

import click

from bench.own_server import BenchSetup, measuring_command
from bench.report import milliseconds, print_rows
from bench.scenario import PlannedRequest, ScenarioRun, Sender, plan_prompts
from bench.stream import RequestFailed, RequestRecord
from bench.summary import Distribution, LoadLevel
from bench.verdict import judge, print_verdicts

__all__ = ["prefix"]

INDEX_STRIDE = 1_000_000
MAX_COST = 0.01
MIN_TTFT_RATIO = 5.0
FLAGS = {True: "--enable-prefix-caching", False: "--no-enable-prefix-caching"}

COST_HEADINGS = ("prefix caching", "all tok/s", "output tok/s", "TTFT ms\np50/p99", "on over off")
HIT_HEADINGS = ("prompts", "cached", "TTFT ms\np50/p99", "faster")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixPlan:
    """What is sent.

    Attributes:
        num_streams, num_requests: of the load without hits.
        input_len, output_len: of its requests.
        hit_input_len: of the prompts with and without hits.
        hit_share: of a prompt that is shared, and so found in the cache.
        num_hits: prompts of either kind.
    """

    num_streams: int
    num_requests: int
    input_len: int
    output_len: int
    hit_input_len: int
    hit_share: float
    num_hits: int
    seed: int
    vocab_size: int

    def misses(self) -> list[PlannedRequest]:
        """The load without hits."""
        return self.requests([self.input_len] * self.num_requests, self.output_len, part=1)

    def warm_up(self) -> list[PlannedRequest]:
        """One request for each stream."""
        return self.requests([self.input_len] * self.num_streams, 2, part=2)

    def pairs(self) -> list[PlannedRequest]:
        """A new prompt, then one that begins as others of its kind do, and so on.

        The first two are for warming up: the second one fills the cache.
        """
        input_lens = [self.hit_input_len] * (self.num_hits + 1)
        shared = round(self.hit_share * self.hit_input_len)
        new = self.requests(input_lens, 1, part=3)
        known = self.requests(input_lens, 1, part=4, shared_prefix_len=shared)
        return [request for pair in zip(new, known, strict=True) for request in pair]

    def requests(
        self, input_lens: Sequence[int], output_len: int, *, part: int, shared_prefix_len: int = 0
    ) -> list[PlannedRequest]:
        """Requests whose prompts no other part has."""
        prompts = plan_prompts(
            input_lens,
            seed=self.seed,
            vocab_size=self.vocab_size,
            first_index=part * INDEX_STRIDE,
            shared_prefix_len=shared_prefix_len,
        )
        return [PlannedRequest(prompt=prompt, output_len=output_len) for prompt in prompts]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hits:
    """New and known prompts, by turns.

    Attributes:
        new_ms, known_ms: times to first token.
        cached_share: of the tokens of the known prompts, by the server's own word.
    """

    new_ms: Distribution
    known_ms: Distribution
    cached_share: float

    @property
    def ratio(self) -> float:
        """How much sooner the first token of a known prompt comes, in the median."""
        return self.new_ms.p50 / self.known_ms.p50


async def measure_cost(sender: Sender, plan: PrefixPlan) -> ScenarioRun:
    """The load without hits on one server."""
    await sender.warm_up(plan.warm_up())
    return await sender.measure(plan.misses(), LoadLevel(concurrency=plan.num_streams))


async def measure_both(
    sender: Sender, plan: PrefixPlan
) -> tuple[ScenarioRun, Hits, list[RequestRecord]]:
    """The load without hits, then new and known prompts, on one server with caching.

    Returns:
        The load, the hits, and the records of the latter.
    """
    run = await measure_cost(sender, plan)
    records = await sender.send_all(plan.pairs(), concurrency=1)
    return run, find_hits(records), records


def find_hits(records: Sequence[RequestRecord]) -> Hits:
    """From the records of `PrefixPlan.pairs`.

    Raises:
        RequestFailed: there were no answers.
    """
    new, known = records[2::2], records[3::2]
    new_ms, known_ms = (
        Distribution.of_seconds(r.first_token_s for r in part if r.first_token_s is not None)
        for part in (new, known)
    )
    if new_ms is None or known_ms is None:
        raise RequestFailed("no answer", "to prompts with or without hits")
    shares = [
        (record.cached_tokens or 0) / record.prompt_tokens
        for record in known
        if record.prompt_tokens
    ]
    return Hits(new_ms=new_ms, known_ms=known_ms, cached_share=fmean(shares) if shares else 0.0)


def total_speed(run: ScenarioRun) -> float:
    """Prompt and output tokens per second."""
    return run.summary.total_tokens_per_s or 0.0


@measuring_command(
    quick={
        "rounds": 1,
        "num_streams": 2,
        "num_requests": 4,
        "input_len": 20,
        "output_len": 2,
        "hit_input_len": 200,
        "num_hits": 2,
    }
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=6,
    show_default=True,
    help="Servers of each kind; on and off take turns in going first.",
)
@click.option("--num-streams", type=click.IntRange(1), default=16, show_default=True)
@click.option("--num-requests", type=click.IntRange(1), default=128, show_default=True)
@click.option("--input-len", type=click.IntRange(1), default=256, show_default=True)
@click.option("--output-len", type=click.IntRange(1), default=16, show_default=True)
@click.option(
    "--hit-input-len",
    type=click.IntRange(2),
    default=1600,
    show_default=True,
    help="Prompts with and without hits.",
)
@click.option(
    "--hit-share",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.9,
    show_default=True,
    help="Of a prompt that is in the cache.",
)
@click.option(
    "--num-hits", type=click.IntRange(1), default=10, show_default=True, help="Prompts per round."
)
def prefix(
    setup: BenchSetup,
    *,
    rounds: int,
    num_streams: int,
    num_requests: int,
    input_len: int,
    output_len: int,
    hit_input_len: int,
    hit_share: float,
    num_hits: int,
) -> None:
    """Measure prefix caching: its cost without hits, and the TTFT with and without.

    SERVE_ARGUMENTS go to every server.
    """
    plan = PrefixPlan(
        num_streams=num_streams,
        num_requests=num_requests,
        input_len=input_len,
        output_len=output_len,
        hit_input_len=hit_input_len,
        hit_share=hit_share,
        num_hits=num_hits,
        seed=setup.seed,
        vocab_size=setup.vocab_size,
    )
    loads: dict[bool, list[ScenarioRun]] = {True: [], False: []}
    hits: list[Hits] = []
    for round_number in range(rounds):
        for is_on in (True, False) if round_number % 2 == 0 else (False, True):
            if is_on:
                run, found, records = setup.measure(
                    [FLAGS[is_on]], partial(measure_both, plan=plan)
                )
                hits.append(found)
                setup.check(records)
            else:
                run = setup.measure([FLAGS[is_on]], partial(measure_cost, plan=plan))
            setup.check(run.records)
            loads[is_on].append(run)
    ratios = [
        total_speed(on) / total_speed(off) if total_speed(off) else float("nan")
        for on, off in zip(loads[True], loads[False], strict=True)
    ]
    print_rows(setup.console, COST_HEADINGS, cost_rows(loads, ratios), title="No hits")
    print_rows(
        setup.console,
        HIT_HEADINGS,
        [row for found in hits for row in hit_rows(found)],
        title=f"Prompts of {hit_input_len} tokens, one at a time",
    )
    cost = 1 - median(ratios)
    ttft_ratio = median(found.ratio for found in hits)
    verdicts = [
        judge(f"cost without hits at most {MAX_COST:.0%} of the throughput", cost, most=MAX_COST),
        judge(
            f"TTFT at least {MIN_TTFT_RATIO:g} times better at {hit_share:.0%} hits",
            ttft_ratio,
            least=MIN_TTFT_RATIO,
        ),
    ]
    print_verdicts(setup.console, verdicts)
    setup.finish(
        {**asdict(plan), "rounds": rounds},
        {
            "on_over_off": ratios,
            "loads": {
                name: [run.summary.as_dict() for run in loads[is_on]]
                for name, is_on in (("on", True), ("off", False))
            },
            "hits": [{**asdict(found), "ratio": found.ratio} for found in hits],
            "verdicts": [asdict(verdict) for verdict in verdicts],
        },
    )


def cost_rows(loads: dict[bool, list[ScenarioRun]], ratios: Sequence[float]) -> list[list[str]]:
    """For the table of COST_HEADINGS, every round."""
    return [
        [
            f"{'on' if is_on else 'off'}, round {number}",
            f"{total_speed(run):.1f}",
            f"{run.summary.output_tokens_per_s:.1f}",
            milliseconds(run.summary.ttft_ms, "p50", "p99"),
            f"{ratio:.4f}" if is_on else "",
        ]
        for number, (on, off, ratio) in enumerate(
            zip(loads[True], loads[False], ratios, strict=True), start=1
        )
        for is_on, run in ((True, on), (False, off))
    ]


def hit_rows(hits: Hits) -> list[list[str]]:
    """For the table of HIT_HEADINGS."""
    return [
        ["new", "", milliseconds(hits.new_ms, "p50", "p99"), ""],
        [
            "known",
            f"{hits.cached_share:.1%}",
            milliseconds(hits.known_ms, "p50", "p99"),
            f"{hits.ratio:.2f}x",
        ],
    ]
