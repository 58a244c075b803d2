"""`headrace bench interference`: what running streams feel when a very long prompt arrives.

Streams run, then a prompt near the context limit comes; once on a server without a step-time budget
and once with one (--target-itl-ms). The budget leaves a prompt the rest of each step: the target
less the time of a step that only decodes, over the cost of a prompt token when it is alone. In
whole steps, that is: small pieces cost more, by reading what lies before them once each, so a very
long prompt beside a small rest cannot reach it.

What the streams are compared with is themselves, before and after: they grow meanwhile, and every
token of theirs costs more.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import batched
from statistics import median
from typing import Any

import click

from bench.own_server import BenchSetup, measuring_command
from bench.report import milliseconds, print_rows
from bench.scenario import PlannedRequest, Sender, plan_prompts
from bench.stream import RequestFailed, RequestRecord
from bench.summary import Distribution, LoadLevel
from bench.verdict import Verdict, judge, print_verdicts
from bench.windows import gaps_between

__all__ = ["Disturbance", "disturb", "interference"]

POLL_S = 0.01
SETTLE_SHARE = 0.1  # of the idle time, after the last stream has begun
SPARE_TOKENS = 16  # of the context, beside the long prompt
MAX_OUTPUT = 4000
# Target over the idle median: half of the steps take longer. Those beside a prompt vary by no
# larger factors than others, so that the P99 is at most about so many times the idle one.
DEFAULT_FACTOR = 2.0
MAX_ITL_RATIO = 2.0
MIN_SPEED_SHARE = 0.85

HEADINGS = (
    *("server", "ITL ms idle\np50/p99", "ITL ms beside\np50/p99/max", "p99 over\nidle"),
    *("prefill s", "prompt\ntok/s", "alone\ntok/s", "budget leaves\ntok/s", "reached"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class InterferencePlan:
    """What is sent.

    Attributes:
        num_streams: that run beside the prompt.
        input_len: of their prompts.
        long_len: of the long prompt; None takes what the context holds.
        idle_s: for so long the streams run undisturbed, before it and after it.
        repeats: of everything, on each server.
    """

    num_streams: int
    input_len: int
    long_len: int | None
    idle_s: float
    repeats: int
    seed: int
    vocab_size: int

    def long_len_of(self, max_model_len: int) -> int:
        """Length of the long prompt on a server with this context."""
        if self.long_len is not None:
            return self.long_len
        return max(1, max_model_len - SPARE_TOKENS)

    def streams(self, part: int, max_model_len: int) -> list[PlannedRequest]:
        """Streams that go on for as long as anyone listens."""
        prompts = plan_prompts(
            [self.input_len] * self.num_streams,
            seed=self.seed,
            vocab_size=self.vocab_size,
            first_index=part * self.num_streams,
        )
        output_len = min(max_model_len - self.input_len, MAX_OUTPUT)
        return [PlannedRequest(prompt=prompt, output_len=output_len) for prompt in prompts]

    def long_prompts(self, max_model_len: int) -> list[PlannedRequest]:
        """Two for each repetition: one for when it is alone, one for when it is not."""
        prompts = plan_prompts(
            [self.long_len_of(max_model_len)] * (2 * self.repeats),
            seed=self.seed + 1,
            vocab_size=self.vocab_size,
        )
        return [PlannedRequest(prompt=prompt, output_len=1) for prompt in prompts]


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbance:
    """One long prompt beside running streams.

    Attributes:
        idle_gaps_s, gaps_s: times between tokens of the streams, before it came and after it was
            done, and while it was being computed.
        prefill_s: from its sending to its first token.
    """

    idle_gaps_s: list[float]
    gaps_s: list[float]
    prefill_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class InterferenceResult:
    """One server.

    Attributes:
        target_itl_ms: its step-time budget.
        idle_ms, beside_ms: times between tokens without and beside the long prompt.
        prefill_s, alone_s: median time of the prompt beside the streams, and alone.
    """

    target_itl_ms: float | None
    long_len: int
    idle_ms: Distribution
    beside_ms: Distribution
    prefill_s: float
    alone_s: float

    @property
    def itl_ratio(self) -> float:
        """P99 beside the prompt over P99 without."""
        return self.beside_ms.p99 / self.idle_ms.p99

    @property
    def budget_tokens_per_s(self) -> float | None:
        """Prompt tokens per second for which the budget leaves time; None without one."""
        if self.target_itl_ms is None:
            return None
        # A step that only decodes is what a token takes in the median of the idle streams.
        rest = max(0.0, self.target_itl_ms - self.idle_ms.p50) / self.target_itl_ms
        return rest * self.long_len / self.alone_s

    @property
    def speed_share(self) -> float | None:
        """Speed of the prompt over what the budget leaves it."""
        budget = self.budget_tokens_per_s
        return self.long_len / self.prefill_s / budget if budget else None

    def row(self) -> list[str]:
        """For the table of HEADINGS."""
        budget, share = self.budget_tokens_per_s, self.speed_share
        return [
            "no budget" if self.target_itl_ms is None else f"{self.target_itl_ms:.1f} ms",
            milliseconds(self.idle_ms, "p50", "p99"),
            milliseconds(self.beside_ms, "p50", "p99", "max"),
            f"{self.itl_ratio:.2f}x",
            f"{self.prefill_s:.2f}",
            f"{self.long_len / self.prefill_s:.0f}",
            f"{self.long_len / self.alone_s:.0f}",
            "-" if budget is None else f"{budget:.0f}",
            "-" if share is None else f"{share:.0%}",
        ]

    def verdicts(self) -> list[Verdict]:
        """Of a server with a budget."""
        return [
            judge(
                f"P99 ITL beside the prompt at most {MAX_ITL_RATIO:g} times the idle one",
                self.itl_ratio,
                most=MAX_ITL_RATIO,
            ),
            judge(
                f"the prompt at {MIN_SPEED_SHARE:.0%} or more of what the budget leaves",
                self.speed_share,
                least=MIN_SPEED_SHARE,
            ),
        ]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self),
            "itl_ratio": self.itl_ratio,
            "budget_tokens_per_s": self.budget_tokens_per_s,
            "speed_share": self.speed_share,
        }


async def measure_server(
    sender: Sender, plan: InterferencePlan, target_itl_ms: float | None
) -> tuple[InterferenceResult, list[RequestRecord]]:
    """Everything on one server.

    Returns:
        The result, and the records of the long prompts.
    """
    max_model_len = sender.model_info.get("max_model_len")
    if not isinstance(max_model_len, int) or max_model_len <= plan.input_len:
        raise RequestFailed("no context", f"the server lists a max_model_len of {max_model_len!r}")
    long_prompts = plan.long_prompts(max_model_len)
    warm_up = plan.streams(plan.repeats, max_model_len)
    await sender.warm_up([replace(stream, output_len=2) for stream in warm_up])
    alone_s, disturbances, records = [], [], []
    # Alone and beside in turn: the machine's own pace changes within minutes.
    for part, (lone_prompt, long_prompt) in enumerate(batched(long_prompts, 2)):
        alone = await sender.measure([lone_prompt], LoadLevel(concurrency=1))
        if alone.summary.ttft_ms is None:
            raise RequestFailed("long prompt", alone.records[0].error_detail or "")
        alone_s.append(alone.summary.ttft_ms.p50 / 1e3)
        records += alone.records
        streams = plan.streams(part, max_model_len)
        disturbance, record = await disturb(
            sender, streams, long_prompt, plan.idle_s, after_s=plan.idle_s
        )
        await sender.wait_until_idle()
        disturbances.append(disturbance)
        records.append(record)
    idle = Distribution.of_seconds(gap for each in disturbances for gap in each.idle_gaps_s)
    beside = Distribution.of_seconds(gap for each in disturbances for gap in each.gaps_s)
    if idle is None or beside is None:
        raise RequestFailed("no tokens", "the streams brought none; is --idle-seconds too short?")
    result = InterferenceResult(
        target_itl_ms=target_itl_ms,
        long_len=plan.long_len_of(max_model_len),
        idle_ms=idle,
        beside_ms=beside,
        prefill_s=median(each.prefill_s for each in disturbances),
        alone_s=median(alone_s),
    )
    return result, records


async def disturb(
    sender: Sender,
    streams: Sequence[PlannedRequest],
    long_prompt: PlannedRequest,
    idle_s: float,
    *,
    after_s: float,
) -> tuple[Disturbance, RequestRecord]:
    """Let streams run, send the long prompt, and leave the streams some time after it is done.

    Args:
        sender: of everything.
        streams: that go on for long enough.
        long_prompt: that disturbs them.
        idle_s: the streams run undisturbed for so long first.
        after_s: and so long afterwards; the gaps that the end of the prompt falls into must end.

    Raises:
        RequestFailed: a request failed, or a stream ended before the prompt was done.
    """
    async with sender.kept_busy(streams.__getitem__, len(streams)) as records:
        while len(records) < len(streams) or any(r.first_token_s is None for r in records):
            check_running(records)
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(SETTLE_SHARE * idle_s)
        idle_start_s = sender.clock()
        await asyncio.sleep(idle_s)
        long_record = RequestRecord(len(streams), sender.clock())
        await sender.send(long_prompt, long_record)
        if long_record.error is not None or long_record.first_token_s is None:
            raise RequestFailed("long prompt", long_record.error_detail or "")
        check_running(records)
        await asyncio.sleep(after_s)
        check_running(records)
        idle_end_s = sender.clock()
    sent_s, done_s = long_record.start_s, long_record.start_s + long_record.first_token_s
    disturbance = Disturbance(
        idle_gaps_s=[
            *gaps_between(records, idle_start_s, sent_s),
            *gaps_between(records, done_s, idle_end_s),
        ],
        gaps_s=gaps_between(records, sent_s, done_s, touching=True),
        prefill_s=long_record.first_token_s,
    )
    return disturbance, long_record


def check_running(records: Sequence[RequestRecord]) -> None:
    """Every stream must still run."""
    for record in records:
        if record.end_s is not None:
            raise RequestFailed(
                record.error or "stream ended",
                record.error_detail
                or "before the prompt was done: less --idle-seconds, or more context",
            )


@measuring_command(
    quick={"num_streams": 2, "input_len": 8, "long_len": 200, "idle_s": 0.5, "repeats": 1}
)
@click.option(
    "--num-streams",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Streams that run beside the prompt.",
)
@click.option("--input-len", type=click.IntRange(1), default=128, show_default=True)
@click.option(
    "--long-len", type=click.IntRange(1), help="Of the prompt. [default: what the context holds]"
)
@click.option(
    "--idle-seconds",
    "idle_s",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="The streams run undisturbed for so long, before and after.",
)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--target-itl-ms",
    type=click.FloatRange(min=0, min_open=True),
    help=f"Step-time budget. [default: {DEFAULT_FACTOR} times the idle median of the ITL]",
)
def interference(
    setup: BenchSetup,
    *,
    num_streams: int,
    input_len: int,
    long_len: int | None,
    idle_s: float,
    repeats: int,
    target_itl_ms: float | None,
) -> None:
    """Measure running streams while a prompt near the context limit prefills.

    Once without and once with --target-itl-ms. SERVE_ARGUMENTS go to both servers.
    """
    plan = InterferencePlan(
        num_streams=num_streams,
        input_len=input_len,
        long_len=long_len,
        idle_s=idle_s,
        repeats=repeats,
        seed=setup.seed,
        vocab_size=setup.vocab_size,
    )
    results: list[InterferenceResult] = []
    for with_budget in (False, True):
        target = None
        if with_budget:
            target = target_itl_ms or DEFAULT_FACTOR * results[0].idle_ms.p50
        result, records = setup.measure(
            [] if target is None else ["--target-itl-ms", f"{target:.3f}"],
            partial(measure_server, plan=plan, target_itl_ms=target),
        )
        setup.check(records)
        results.append(result)
    print_rows(
        setup.console,
        HEADINGS,
        [result.row() for result in results],
        title=f"{num_streams} streams beside a prompt of {results[0].long_len} tokens",
    )
    verdicts = results[1].verdicts()
    print_verdicts(setup.console, verdicts)
    setup.finish(
        asdict(plan),
        {
            "servers": [result.as_dict() for result in results],
            "verdicts": [asdict(verdict) for verdict in verdicts],
        },
    )
