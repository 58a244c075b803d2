"""What each side reached, how it compares, and the demands on that."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from bench.comparison.golden import GoldenResult
from bench.comparison.plan import PeersPlan, stream_name
from bench.comparison.sides import HEADRACE, HEADRACE_INT8, OPENVINO, SERVER_PEERS
from bench.summary import Distribution, LoadSummary
from bench.verdict import Verdict, judge

__all__ = [
    "METRICS",
    "MetricName",
    "PeersResult",
    "ProductLimit",
    "SideRun",
    "WorkloadRun",
    "judge_peers",
]

MAX_WARM_S = 5.0
MAX_COLD_S = 20.0
OVER_SERVERS = 2.0  # throughput, at least
OVER_SERVERS_FROM = 8  # streams
OVER_OPENVINO = 1.0  # likewise
OVER_OPENVINO_FEW = 0.9  # at 8 streams, and of prompts
ITL_OVER_SERVERS = 1.0  # at most
DISTURBED_OVER_SERVERS = 1 / 3
LIMIT_SHARES = {HEADRACE: 0.75, HEADRACE_INT8: 0.6}

type MetricName = str


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductLimit:
    """What the products of a model allow on this machine.

    Attributes:
        bf16_gflops, int8_gflops: rates of products, in billions of operations a second.
        matrix_weights: that each token is multiplied with.
    """

    bf16_gflops: float
    int8_gflops: float
    matrix_weights: int

    def output_tokens_per_s(self, gflops: float, input_len: int, output_len: int) -> float:
        """Output tokens per second if there were nothing but products."""
        operations = 2.0 * self.matrix_weights * (input_len + output_len)
        return 1e9 * gflops / operations * output_len


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadRun:
    """One workload on one side, in one round.

    Attributes:
        summary: for "long-prompt", of the long prompt alone; None if it failed as a whole.
        beside_ms: for "long-prompt": time between tokens of the streams beside it.
        failure: why there is no summary.
    """

    workload: str
    summary: LoadSummary | None = None
    beside_ms: Distribution | None = None
    failure: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "workload": self.workload,
            "summary": None if self.summary is None else self.summary.as_dict(),
            "beside_ms": None if self.beside_ms is None else asdict(self.beside_ms),
            "failure": self.failure,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class SideRun:
    """A side in one round.

    Attributes:
        is_cold: it had nothing compiled when it started.
        ready_s: from its start until it was ready; None if it never was.
        peak_memory_bytes: of the process and its children.
        golden: for ours only.
        failure: why the round ended early; None if it did not.
        last_words: the end of what it wrote, if it failed.
    """

    side: str
    round_number: int
    is_cold: bool
    ready_s: float | None = None
    peak_memory_bytes: int | None = None
    golden: GoldenResult | None = None
    workloads: Sequence[WorkloadRun] = field(default_factory=list)
    failure: str | None = None
    last_words: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Last words are for the console: they are full of paths."""
        return {
            "side": self.side,
            "round": self.round_number,
            "is_cold": self.is_cold,
            "ready_s": self.ready_s,
            "peak_memory_bytes": self.peak_memory_bytes,
            "golden": None if self.golden is None else self.golden.as_dict(),
            "workloads": [run.as_dict() for run in self.workloads],
            "failure": self.failure,
        }


def from_summary(
    read: Callable[[LoadSummary], float | None],
) -> Callable[[WorkloadRun], float | None]:
    """A metric of the summary, where there is one and it has tokens."""

    def read_run(run: WorkloadRun) -> float | None:
        summary = run.summary
        return None if summary is None or not summary.output_tokens else read(summary)

    return read_run


def itl_of(run: WorkloadRun, name: str) -> float | None:
    """Time between tokens: of the streams beside a long prompt, if there is one."""
    found = run.beside_ms or (run.summary.itl_ms if run.summary else None)
    return None if found is None else getattr(found, name)


def prefill_rate(summary: LoadSummary) -> float | None:
    """Prompt tokens per second."""
    tokens = summary.prompt_tokens
    return None if tokens is None else tokens / summary.duration_s


METRICS: Mapping[MetricName, Callable[[WorkloadRun], float | None]] = {
    "output_tokens_per_s": from_summary(lambda s: s.output_tokens_per_s),
    "total_tokens_per_s": from_summary(lambda s: s.total_tokens_per_s),
    "prompt_tokens_per_s": from_summary(prefill_rate),
    "ttft_p50_ms": from_summary(lambda s: None if s.ttft_ms is None else s.ttft_ms.p50),
    "ttft_p99_ms": from_summary(lambda s: None if s.ttft_ms is None else s.ttft_ms.p99),
    "itl_p50_ms": lambda run: itl_of(run, "p50"),
    "itl_p99_ms": lambda run: itl_of(run, "p99"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PeersResult:
    """Everything that was measured.

    Attributes:
        sides: names, ours first.
        workloads: names, in order.
        limits: for each round.
    """

    sides: Sequence[str]
    workloads: Sequence[str]
    runs: Sequence[SideRun]
    limits: Mapping[int, ProductLimit]

    def runs_of(self, side: str) -> list[SideRun]:
        """The rounds of a side."""
        return [run for run in self.runs if run.side == side]

    def by_round(self, side: str, workload: str, metric: MetricName) -> dict[int, float]:
        """A metric in each round in which it was measured."""
        return {
            run.round_number: value
            for run in self.runs_of(side)
            for entry in run.workloads
            if entry.workload == workload and (value := METRICS[metric](entry)) is not None
        }

    def figure(self, side: str, workload: str, metric: MetricName) -> float | None:
        """The median over the rounds."""
        return median_of(self.by_round(side, workload, metric).values())

    def ratio(
        self, workload: str, metric: MetricName, peers: Sequence[str], best: Callable[..., float]
    ) -> float | None:
        """Ours over the best of some peers' in the same round: the median of the rounds.

        Args:
            workload: name.
            metric: what is compared.
            peers: names of sides.
            best: max or min, of several peers' figures.
        """
        theirs = [self.by_round(peer, workload, metric) for peer in peers]
        ratios = []
        for number, value in self.by_round(HEADRACE, workload, metric).items():
            found = [rounds[number] for rounds in theirs if rounds.get(number)]
            if found:
                ratios.append(value / best(found))
        return median_of(ratios)

    def ready_s(self, side: str, *, is_cold: bool) -> float | None:
        """Median time until a side was ready."""
        return median_of(
            run.ready_s
            for run in self.runs_of(side)
            if run.is_cold == is_cold and run.ready_s is not None
        )

    def peak_memory_bytes(self, side: str) -> int | None:
        """The most that a side took in any round."""
        return max((run.peak_memory_bytes or 0 for run in self.runs_of(side)), default=0) or None

    def limit_share(self, side: str, plan: PeersPlan) -> float | None:
        """Share of its product limit that one of ours reached with the most streams."""
        reached = self.by_round(side, stream_name(max(plan.streams)), "output_tokens_per_s")
        shares = []
        for number, value in reached.items():
            if (found := self.limits.get(number)) is not None:
                gflops = found.int8_gflops if side == HEADRACE_INT8 else found.bf16_gflops
                most = found.output_tokens_per_s(gflops, plan.input_len, plan.output_len)
                shares.append(value / most)
        return median_of(shares)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: medians and ratios first, then what they are made of."""
        return {
            "figures": {
                side: {
                    workload: {metric: self.figure(side, workload, metric) for metric in METRICS}
                    for workload in self.workloads
                }
                for side in self.sides
            },
            "headrace_over": {
                side: {
                    workload: {
                        metric: self.ratio(workload, metric, [side], max) for metric in METRICS
                    }
                    for workload in self.workloads
                }
                for side in self.sides
                if side != HEADRACE
            },
            "limits": [{"round": number, **asdict(found)} for number, found in self.limits.items()],
            "runs": [run.as_dict() for run in self.runs],
        }


def median_of(values: Iterable[float]) -> float | None:
    """The median; None of no values."""
    known = list(values)
    return median(known) if known else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """A bound on the ratio of ours to theirs.

    Attributes:
        is_speed: more is better, so that the bounds are the least; else they are the most.
        over_servers: compared with the best of SERVER_PEERS.
        over_openvino: compared with OpenVINO; None demands nothing.
    """

    what: str
    workload: str
    metric: MetricName
    is_speed: bool
    over_servers: float
    over_openvino: float | None = None


def list_demands(plan: PeersPlan) -> list[Demand]:
    """What is demanded of the workloads of a plan."""
    speeds = [
        (
            f"output tokens/s at {count} streams",
            stream_name(count),
            "output_tokens_per_s",
            OVER_OPENVINO_FEW if count == OVER_SERVERS_FROM else OVER_OPENVINO,
        )
        for count in plan.streams
        if count >= OVER_SERVERS_FROM
    ]
    speeds += [
        ("prefill alone, tokens/s", "prefill", "prompt_tokens_per_s", OVER_OPENVINO_FEW),
        (
            "output tokens/s with exponential lengths",
            "exponential",
            "output_tokens_per_s",
            OVER_OPENVINO,
        ),
    ]
    times = [
        ("median ITL at 1 stream", stream_name(1), "itl_p50_ms", ITL_OVER_SERVERS),
        ("P99 ITL beside a long prompt", "long-prompt", "itl_p99_ms", DISTURBED_OVER_SERVERS),
    ]
    return [
        Demand(
            what=what,
            workload=workload,
            metric=metric,
            is_speed=True,
            over_servers=OVER_SERVERS,
            over_openvino=over_openvino,
        )
        for what, workload, metric, over_openvino in speeds
    ] + [
        Demand(what=what, workload=workload, metric=metric, is_speed=False, over_servers=most)
        for what, workload, metric, most in times
    ]


def judge_peers(result: PeersResult, plan: PeersPlan) -> list[Verdict]:
    """The demands on ours, as far as this run was about them."""
    servers = [side for side in SERVER_PEERS if side in result.sides]
    verdicts = []
    for demand in list_demands(plan):
        rivals: list[tuple[Sequence[str], float | None]] = [(servers, demand.over_servers)]
        if OPENVINO in result.sides:
            rivals.append(([OPENVINO], demand.over_openvino))
        for peers, bound in rivals:
            if not peers or bound is None or demand.workload not in result.workloads:
                continue
            best = max if demand.is_speed else min
            ratio = result.ratio(demand.workload, demand.metric, peers, best)
            name = peers[0] if len(peers) == 1 else f"the best of {' and '.join(peers)}"
            word = "at least" if demand.is_speed else "at most"
            verdicts.append(
                judge(
                    f"{demand.what}: {word} {bound:.3g} times {name}",
                    ratio,
                    least=bound if demand.is_speed else None,
                    most=None if demand.is_speed else bound,
                )
            )
    return verdicts + judge_ours(result, plan)


def judge_ours(result: PeersResult, plan: PeersPlan) -> list[Verdict]:
    """What is demanded of ours without any peer."""
    verdicts = []
    for is_cold, most in ((True, MAX_COLD_S), (False, MAX_WARM_S)):
        if any(run.is_cold == is_cold for run in result.runs_of(HEADRACE)):
            word = "cold" if is_cold else "warm"
            verdicts.append(
                judge(
                    f"{word}, ready within {most:g} s",
                    result.ready_s(HEADRACE, is_cold=is_cold),
                    most=most,
                )
            )
    for side, least in LIMIT_SHARES.items():
        if side in result.sides and result.limits and "streams" in plan.kinds:
            verdicts.append(
                judge(
                    f"{side}: at least {least:.0%} of the product limit",
                    result.limit_share(side, plan),
                    least=least,
                )
            )
    for golden in (run.golden for run in result.runs_of(HEADRACE)):
        if golden is not None:
            verdicts.append(
                judge(
                    "share of golden answers that hold in bfloat16",
                    golden.num_held / golden.num_cases,
                    least=1.0,
                )
            )
    return verdicts
