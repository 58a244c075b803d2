"""`headrace bench prefix`: what prefix caching costs when nothing hits, and gains when most does.

The cost: two servers, with caching and without, do the same short pieces of work by turns. Their
prompts have nothing in common, so all that caching can do is to take time. A piece is over in a
second or two, and its neighbour is what it is compared with, so that changes of the machine's speed
hit both; the median of many pairs, with its interval, tells differences that no single run shows.
Servers are started anew a few times, because each has a speed of its own.

Besides, what the bookkeeping takes of the host is measured directly, and compared with the time
that the engine takes for the same work. It is not all: with caching, blocks that were just used are
the last to be used again, so that they are less often in the caches of the processor. That is in
the pairs only.

The gain: one request at a time, by turns a new prompt and one whose beginning is cached.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean, median

import click
from rich.console import Console

from bench.own_server import BenchSetup, measuring_command
from bench.paired import Estimate, by_turns, estimate
from bench.report import milliseconds, print_rows
from bench.scenario import PlannedRequest, ScenarioRun, Sender, plan_prompts
from bench.simulation.cache_cost import Bookkeeping, measure_bookkeeping
from bench.stream import RequestFailed, RequestRecord
from bench.summary import Distribution, LoadLevel
from bench.verdict import judge, print_verdicts

__all__ = ["prefix"]

INDEX_STRIDE = 1_000_000
MAX_COST = 0.01
MIN_TTFT_RATIO = 5.0
FLAGS = {True: "--enable-prefix-caching", False: "--no-enable-prefix-caching"}

COST_HEADINGS = ("servers", "pairs", "tok/s on", "tok/s off", "cost", "95 % interval")
HIT_HEADINGS = ("prompts", "cached", "TTFT ms\np50/p99", "faster")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixPlan:
    """What is sent.

    Attributes:
        num_streams, num_requests: of a piece of the load without hits.
        num_pairs: pieces for each server of a round, and one more for warming up.
        input_len, output_len: of its requests.
        hit_input_len: of the prompts with and without hits.
        hit_share: of a prompt that is shared, and so found in the cache.
        num_hits: prompts of either kind.
    """

    num_streams: int
    num_requests: int
    num_pairs: int
    input_len: int
    output_len: int
    hit_input_len: int
    hit_share: float
    num_hits: int
    seed: int
    vocab_size: int

    def piece(self, number: int) -> list[PlannedRequest]:
        """A piece of the load without hits; no other has its prompts."""
        input_lens = [self.input_len] * self.num_requests
        return self.requests(input_lens, self.output_len, part=5 + number)

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

    def bookkeeping(self) -> Bookkeeping:
        """What the cache's bookkeeping takes for some pieces."""
        prompts = [request.prompt for number in range(8) for request in self.piece(number)]
        ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
        return measure_bookkeeping(ids, self.output_len, num_rows=self.num_streams)


@dataclass(frozen=True, slots=True)
class Pair:
    """The same piece of work, with caching and without, one right after the other."""

    on: ScenarioRun
    off: ScenarioRun

    @property
    def cost(self) -> float:
        """Share of the throughput that caching takes."""
        on_s, off_s = self.on.summary.duration_s, self.off.summary.duration_s
        return 1 - off_s / on_s if on_s else math.nan


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


async def measure_round(
    senders: Sequence[Sender], plan: PrefixPlan, progress: Console
) -> tuple[list[Pair], Hits, list[RequestRecord]]:
    """Pieces of the load by turns, then new and known prompts.

    Args:
        senders: to a server with caching, and to one without.
        plan: what to send.
        progress: for a line about the pairs.

    Returns:
        The pairs, the hits, and the records of the latter.
    """
    on, off = senders
    for sender in senders:
        await sender.warm_up(plan.piece(0))
    pairs = []
    for number, order in enumerate(by_turns(on, off, plan.num_pairs), start=1):
        level = LoadLevel(concurrency=plan.num_streams)
        runs = {id(sender): await sender.measure(plan.piece(number), level) for sender in order}
        pairs.append(Pair(on=runs[id(on)], off=runs[id(off)]))
    progress.print(f"  cost {text_of(estimate([pair.cost for pair in pairs]))}", markup=False)
    records = await on.send_all(plan.pairs(), concurrency=1)
    return pairs, find_hits(records), records


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


def busy_per_token_s(runs: Sequence[ScenarioRun], plan: PrefixPlan) -> float:
    """Seconds that the engine has a step in flight, for each token of the load."""
    num_tokens = len(runs) * plan.num_requests * (plan.input_len + plan.output_len)
    return sum(run.counters.busy_s for run in runs) / num_tokens


@measuring_command(
    quick={
        "rounds": 1,
        "num_pairs": 2,
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
    default=4,
    show_default=True,
    help="Pairs of servers, one after the other.",
)
@click.option(
    "--num-pairs",
    type=click.IntRange(1),
    default=40,
    show_default=True,
    help="Pieces of the load for each server of a round; the two take turns.",
)
@click.option("--num-streams", type=click.IntRange(1), default=16, show_default=True)
@click.option(
    "--num-requests", type=click.IntRange(1), default=16, show_default=True, help="Of a piece."
)
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
    num_pairs: int,
    num_streams: int,
    num_requests: int,
    input_len: int,
    output_len: int,
    hit_input_len: int,
    hit_share: float,
    num_hits: int,
) -> None:
    """Measure prefix caching: its cost without hits, and the TTFT with and without.

    Both servers of a round run at the same time, and one of them works. SERVE_ARGUMENTS go to
    every server.
    """
    plan = PrefixPlan(
        num_streams=num_streams,
        num_requests=num_requests,
        num_pairs=num_pairs,
        input_len=input_len,
        output_len=output_len,
        hit_input_len=hit_input_len,
        hit_share=hit_share,
        num_hits=num_hits,
        seed=setup.seed,
        vocab_size=setup.vocab_size,
    )
    pairs: list[list[Pair]] = []
    hits: list[Hits] = []
    work = partial(measure_round, plan=plan, progress=setup.progress)
    for _ in range(rounds):
        found, its_hits, records = setup.measure_together([[FLAGS[True]], [FLAGS[False]]], work)
        setup.check(records)
        for pair in found:
            setup.check([*pair.on.records, *pair.off.records])
        pairs.append(found)
        hits.append(its_hits)
    every = [pair for found in pairs for pair in found]
    cost = estimate([pair.cost for pair in every])
    bookkeeping = plan.bookkeeping()
    token_s = busy_per_token_s([pair.off for pair in every], plan)
    share = bookkeeping.us_per_token * 1e-6 / token_s if token_s else math.nan
    print_rows(setup.console, COST_HEADINGS, cost_rows(pairs), title="No hits")
    setup.console.print(
        f"The cache's bookkeeping takes the host {bookkeeping.us_per_token:.2f} us per token, and "
        f"the engine {1e6 * token_s:.1f} us: {share:.2%}",
        markup=False,
        highlight=False,
    )
    print_rows(
        setup.console,
        HIT_HEADINGS,
        [row for its_hits in hits for row in hit_rows(its_hits)],
        title=f"Prompts of {hit_input_len} tokens, one at a time",
    )
    verdicts = [
        judge(
            f"cost without hits at most {MAX_COST:.0%} of the throughput, with "
            f"{cost.confidence:.0%} confidence",
            cost.high,
            most=MAX_COST,
        ),
        judge(
            f"bookkeeping without hits at most {MAX_COST:.0%} of the engine's time",
            share,
            most=MAX_COST,
        ),
        judge(
            f"TTFT at least {MIN_TTFT_RATIO:g} times better at {hit_share:.0%} hits",
            median(its_hits.ratio for its_hits in hits),
            least=MIN_TTFT_RATIO,
        ),
    ]
    print_verdicts(setup.console, verdicts)
    setup.finish(
        {**asdict(plan), "rounds": rounds},
        {
            "cost": asdict(cost),
            "bookkeeping": {
                **asdict(bookkeeping),
                "us_per_token": bookkeeping.us_per_token,
                "engine_us_per_token": 1e6 * token_s,
                "share": share,
            },
            "pairs": [
                {
                    "round": number,
                    "on_s": pair.on.summary.duration_s,
                    "off_s": pair.off.summary.duration_s,
                    "on_busy_s": pair.on.counters.busy_s,
                    "off_busy_s": pair.off.counters.busy_s,
                    "cost": pair.cost,
                }
                for number, found in enumerate(pairs)
                for pair in found
            ],
            "hits": [{**asdict(its_hits), "ratio": its_hits.ratio} for its_hits in hits],
            "verdicts": [asdict(verdict) for verdict in verdicts],
        },
    )


def text_of(cost: Estimate) -> str:
    """The median and its interval, in percent."""
    return f"{cost.median:+.2%} ({cost.low:+.2%} to {cost.high:+.2%})"


def cost_rows(rounds: Sequence[Sequence[Pair]]) -> list[list[str]]:
    """For the table of COST_HEADINGS: every round, and all together."""
    named = [(f"round {number}", pairs) for number, pairs in enumerate(rounds, start=1)]
    if len(rounds) > 1:
        named.append(("all", [pair for pairs in rounds for pair in pairs]))
    rows = []
    for name, pairs in named:
        cost = estimate([pair.cost for pair in pairs])
        speeds = [
            median(run.summary.total_tokens_per_s or 0.0 for run in runs)
            for runs in ([pair.on for pair in pairs], [pair.off for pair in pairs])
        ]
        rows.append(
            [
                *(name, str(cost.num_pairs), *(f"{speed:.1f}" for speed in speeds)),
                *(f"{cost.median:+.2%}", f"{cost.low:+.2%} to {cost.high:+.2%}"),
            ]
        )
    return rows


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
