"""`headrace bench overload`: twice as many requests as the server can bear.

First the peak, on a server of its own whose queue refuses nothing. Then arrivals at twice that rate
at a server with a short queue: the goodput counts only the tokens of requests that were answered to
their end. Last, to this server, full, one request after another: how soon is each refused?
"""

import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import click

from bench.own_server import BenchSetup, measuring_command
from bench.report import milliseconds, print_rows
from bench.scenario import PlannedRequest, Sender, plan_prompts
from bench.stream import RequestFailed, RequestRecord
from bench.summary import Distribution
from bench.verdict import Verdict, judge, print_verdicts
from bench.windows import output_tokens_between
from bench.workload import arrival_times

__all__ = ["overload"]

REFUSED = "http 429"
INDEX_STRIDE = 1_000_000
POLL_S = 0.01
PROBE_INTERVAL_S = 0.02
PEAK_QUEUE = 1024
PEAK_STREAMS = 1.5  # per row: a request that ends is replaced by one that waits already
SPARE_FILLERS = 2  # beyond what the server can hold, so that a refusal shows that it is full
FILLER_TOKENS = 1000  # outputs that outlast the probes
MIN_GOODPUT_SHARE = 0.95
MAX_REFUSAL_MS = 10.0

HEADINGS = ("load", "output tok/s", "req/s", "answered", "refused", "refusal ms\np50/p99/max")


@dataclass(frozen=True, kw_only=True, slots=True)
class OverloadPlan:
    """What is sent.

    Attributes:
        batch_size: rows of the engine.
        num_queued: requests that may wait.
        input_len, output_len: of each request.
        factor: arrivals over what the server can bear.
        duration_s: of each window.
        settle_s: the load runs for so long before.
        num_probes: requests to the full server.
    """

    batch_size: int
    num_queued: int
    input_len: int
    output_len: int
    factor: float
    duration_s: float
    settle_s: float
    num_probes: int
    seed: int
    vocab_size: int

    @property
    def flags(self) -> list[str]:
        """Of the server that is overloaded."""
        return [
            *("--max-num-seqs", str(self.batch_size)),
            *("--max-num-queued-reqs", str(self.num_queued)),
        ]

    @property
    def peak_flags(self) -> list[str]:
        """Of the server whose peak is measured."""
        return replace(self, num_queued=max(PEAK_QUEUE, self.batch_size)).flags

    def request(self, number: int, *, part: int, output_len: int | None = None) -> PlannedRequest:
        """Request `number` of a part; no other has its prompt."""
        (prompt,) = plan_prompts(
            [self.input_len],
            seed=self.seed,
            vocab_size=self.vocab_size,
            first_index=part * INDEX_STRIDE + number,
        )
        return PlannedRequest(prompt=prompt, output_len=output_len or self.output_len)

    def warm_up(self) -> list[PlannedRequest]:
        """A short request for each row."""
        return [self.request(number, part=0, output_len=2) for number in range(self.batch_size)]

    def arrivals(self, rate: float) -> list[float]:
        """When requests are due over settling and window."""
        end_s = self.settle_s + self.duration_s
        return list(
            itertools.takewhile(lambda now_s: now_s < end_s, arrival_times(rate, 1.0, self.seed))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OverloadResult:
    """What was found.

    Attributes:
        peak_tokens_per_s: output tokens per second with requests always at hand.
        offered_rate: arrivals per second in the overload.
        goodput_tokens_per_s: output tokens per second of requests answered to their end.
        num_answered, num_refused: requests of the overload.
        overload_refusal_ms, quiet_refusal_ms: until a refusal was read, in the overload, and one
            at a time from a full server.
        num_without_retry_after: refusals of either kind that did not say when to come back.
        num_probes_taken: requests that found the full server with room after all.
    """

    peak_tokens_per_s: float
    offered_rate: float
    goodput_tokens_per_s: float
    num_answered: int
    num_refused: int
    overload_refusal_ms: Distribution | None
    quiet_refusal_ms: Distribution | None
    num_without_retry_after: int
    num_probes_taken: int

    @property
    def goodput_share(self) -> float | None:
        """Goodput over peak."""
        return (
            self.goodput_tokens_per_s / self.peak_tokens_per_s if self.peak_tokens_per_s else None
        )

    def verdicts(self) -> list[Verdict]:
        refusal_ms = self.quiet_refusal_ms
        return [
            judge(
                f"goodput at least {MIN_GOODPUT_SHARE:.0%} of the peak",
                self.goodput_share,
                least=MIN_GOODPUT_SHARE,
            ),
            judge(
                f"P99 until a refusal at most {MAX_REFUSAL_MS:g} ms, one at a time",
                None if refusal_ms is None else refusal_ms.p99,
                most=MAX_REFUSAL_MS,
            ),
            judge(
                "refusals without Retry-After: none",
                float(self.num_without_retry_after),
                most=0.0,
            ),
        ]


async def measure_peak(sender: Sender, plan: OverloadPlan) -> tuple[float, list[RequestRecord]]:
    """Output tokens per second when the next request is always there already.

    Returns:
        The peak, and the records.

    Raises:
        RequestFailed: no token came, so there is nothing to compare with.
    """
    await sender.warm_up(plan.warm_up())
    concurrency = math.ceil(PEAK_STREAMS * plan.batch_size)
    async with sender.kept_busy(partial(plan.request, part=1), concurrency) as records:
        await asyncio.sleep(plan.settle_s)
        start_s = sender.clock()
        await asyncio.sleep(plan.duration_s)
        end_s = sender.clock()
    await sender.wait_until_idle()
    tokens = output_tokens_between(records, start_s, end_s)
    if not tokens:
        raise_failure(records)
        raise RequestFailed("no tokens", "within the window; is --duration too short?")
    return tokens / (end_s - start_s), records


async def measure_overload(
    sender: Sender, plan: OverloadPlan, peak_tokens_per_s: float
) -> tuple[OverloadResult, list[RequestRecord]]:
    """The overload, then the probes of the full server.

    Returns:
        The result, and the records.
    """
    await sender.warm_up(plan.warm_up())
    rate = plan.factor * peak_tokens_per_s / plan.output_len
    planned = [
        replace(plan.request(number, part=2), arrival_s=arrival_s)
        for number, arrival_s in enumerate(plan.arrivals(rate))
    ]
    start_s = sender.clock() + plan.settle_s
    records = await sender.send_all(planned)
    answered = [record for record in records if record.error is None]
    refused = [record for record in records if record.error == REFUSED]
    await sender.wait_until_idle()
    probes = await probe_full_server(sender, plan)
    quiet = [record for record in probes if record.error == REFUSED]
    result = OverloadResult(
        peak_tokens_per_s=peak_tokens_per_s,
        offered_rate=rate,
        goodput_tokens_per_s=output_tokens_between(answered, start_s, start_s + plan.duration_s)
        / plan.duration_s,
        num_answered=len(answered),
        num_refused=len(refused),
        overload_refusal_ms=refusal_times(refused),
        quiet_refusal_ms=refusal_times(quiet),
        num_without_retry_after=sum(r.retry_after is None for r in (*refused, *quiet)),
        num_probes_taken=len(probes) - len(quiet),
    )
    return result, [*records, *probes]


async def probe_full_server(sender: Sender, plan: OverloadPlan) -> list[RequestRecord]:
    """Fill the rows and the queue, then send one request after another."""
    context = sender.model_info.get("max_model_len")
    room = context - plan.input_len if isinstance(context, int) else FILLER_TOKENS
    output_len = max(1, min(FILLER_TOKENS, room))
    filled: list[RequestRecord] = []
    tasks: list[asyncio.Future[None]] = []

    def add_fillers(count: int) -> None:
        for number in range(len(filled), len(filled) + count):
            record = RequestRecord(number, sender.clock())
            filled.append(record)
            filler = plan.request(number, part=3, output_len=output_len)
            tasks.append(asyncio.ensure_future(sender.send(filler, record)))

    probes: list[RequestRecord] = []
    try:
        add_fillers(plan.batch_size)
        while any(record.first_token_s is None and record.end_s is None for record in filled):
            raise_failure(filled)
            await asyncio.sleep(POLL_S)
        add_fillers(plan.num_queued + SPARE_FILLERS)
        while not any(record.error == REFUSED for record in filled):
            raise_failure(filled)
            if all(task.done() for task in tasks):
                raise RequestFailed("never full", f"{len(filled)} requests fitted")
            await asyncio.sleep(POLL_S)
        for number in range(plan.num_probes):
            await asyncio.sleep(PROBE_INTERVAL_S)
            record = RequestRecord(number, sender.clock())
            probes.append(record)
            await sender.send(plan.request(number, part=4, output_len=1), record)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await sender.wait_until_idle()
    return probes


def raise_failure(records: Sequence[RequestRecord]) -> None:
    """Raise RequestFailed if a request has failed otherwise than by a refusal."""
    for record in records:
        if record.error not in (None, REFUSED):
            raise RequestFailed(record.error or "", record.error_detail or "")


def refusal_times(records: Sequence[RequestRecord]) -> Distribution | None:
    """From the sending to the end of each answer; how late the client sent does not count."""
    return Distribution.of_seconds(
        record.end_s - record.lag_s for record in records if record.end_s is not None
    )


def overload_rows(plan: OverloadPlan, result: OverloadResult) -> list[list[str]]:
    """For the table of HEADINGS."""

    def rate(tokens_per_s: float) -> list[str]:
        return [f"{tokens_per_s:.1f}", f"{tokens_per_s / plan.output_len:.2f}"]

    return [
        ["peak", *rate(result.peak_tokens_per_s), "", "", ""],
        [
            f"{plan.factor:g} times the peak: {result.offered_rate:.2f} req/s",
            *rate(result.goodput_tokens_per_s),
            str(result.num_answered),
            str(result.num_refused),
            milliseconds(result.overload_refusal_ms, "p50", "p99", "max"),
        ],
        [
            "full, one request at a time",
            "",
            "",
            str(result.num_probes_taken),
            str(plan.num_probes - result.num_probes_taken),
            milliseconds(result.quiet_refusal_ms, "p50", "p99", "max"),
        ],
    ]


@measuring_command(
    quick={
        "batch_size": 4,
        "num_queued": 4,
        "input_len": 8,
        "output_len": 8,
        "duration_s": 3.0,
        "settle_s": 1.0,
        "num_probes": 20,
    }
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Rows of the engine: its --max-num-seqs.",
)
@click.option(
    "--num-queued",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Requests that may wait: its --max-num-queued-reqs.",
)
@click.option("--input-len", type=click.IntRange(1), default=64, show_default=True)
@click.option("--output-len", type=click.IntRange(1), default=64, show_default=True)
@click.option(
    "--factor",
    type=click.FloatRange(min=1),
    default=2.0,
    show_default=True,
    help="Arrivals over what the server can bear.",
)
@click.option(
    "--duration",
    "duration_s",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds of each window.",
)
@click.option(
    "--settle",
    "settle_s",
    type=click.FloatRange(min=0),
    default=20.0,
    show_default=True,
    help="Seconds of load before it.",
)
@click.option(
    "--num-probes",
    type=click.IntRange(1),
    default=200,
    show_default=True,
    help="Requests to the full server.",
)
def overload(
    setup: BenchSetup,
    *,
    batch_size: int,
    num_queued: int,
    input_len: int,
    output_len: int,
    factor: float,
    duration_s: float,
    settle_s: float,
    num_probes: int,
) -> None:
    """Offer a server twice its peak: goodput, and how soon and how well it refuses.

    SERVE_ARGUMENTS go to both servers.
    """
    plan = OverloadPlan(
        batch_size=batch_size,
        num_queued=num_queued,
        input_len=input_len,
        output_len=output_len,
        factor=factor,
        duration_s=duration_s,
        settle_s=settle_s,
        num_probes=num_probes,
        seed=setup.seed,
        vocab_size=setup.vocab_size,
    )
    peak_tokens_per_s, records = setup.measure(plan.peak_flags, partial(measure_peak, plan=plan))
    setup.check(records)
    result, records = setup.measure(
        plan.flags, partial(measure_overload, plan=plan, peak_tokens_per_s=peak_tokens_per_s)
    )
    setup.check(records, expected=[REFUSED])
    print_rows(setup.console, HEADINGS, overload_rows(plan, result))
    verdicts = result.verdicts()
    print_verdicts(setup.console, verdicts)
    setup.finish(
        asdict(plan),
        {
            **asdict(result),
            "goodput_share": result.goodput_share,
            "verdicts": [asdict(verdict) for verdict in verdicts],
        },
    )
