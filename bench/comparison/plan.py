"""What `headrace bench peers` sends: the same workloads to every side."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from bench.lengths import LengthConfig, draw_lengths
from bench.scenario import PlannedRequest, plan_prompts
from bench.workload import Prompt, PromptKind

__all__ = ["WORKLOAD_KINDS", "PeersPlan", "Workload", "WorkloadKind", "stream_name"]

WorkloadKind = Literal["streams", "exponential", "prefix", "prefill", "long-prompt", "open"]
WORKLOAD_KINDS: tuple[WorkloadKind, ...] = get_args(WorkloadKind)

MIN_REQUESTS = 3  # of a closed loop
PREFIX_SHARE = 0.9
WARMUP_REQUESTS = 16
WARMUP_OUTPUT = 4
CONTEXT_STEP = 256
# Prompts of a workload are numbered from its own multiple of this on, and of a round from another.
NUMBERS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests, and how they are sent.

    Attributes:
        name: for tables and JSON; unique in a plan.
        concurrency: requests in flight in a closed loop; None sends each when it is due.
        requests: for "long-prompt" the streams, then the prompt that disturbs them.
    """

    name: str
    kind: WorkloadKind
    concurrency: int | None
    requests: Sequence[PlannedRequest]


@dataclass(frozen=True, kw_only=True, slots=True)
class PeersPlan:
    """Sizes of all workloads; lengths are in tokens.

    Attributes:
        kinds: of workloads to run.
        streams: numbers of streams of the closed loops with equal lengths.
        requests_per_stream: of every closed loop.
        batch_streams: of the workloads "exponential", "prefix" and "prefill".
        exponential_mean, exponential_cap: of output lengths.
        prefix_len: of a prompt, PREFIX_SHARE of which all of them share.
        prefix_output_len: of their outputs.
        disturbed_streams: that run while a prompt of `long_len` arrives.
        idle_s: they run alone for so long first.
        open_streams: that arrive all at once, with `open_input_len` and `open_output_len`.
    """

    kinds: tuple[WorkloadKind, ...] = WORKLOAD_KINDS
    streams: tuple[int, ...] = (1, 8, 32, 64)
    input_len: int = 128
    output_len: int = 64
    requests_per_stream: int = 2
    batch_streams: int = 32
    exponential_mean: int = 128
    exponential_cap: int = 512
    prefix_len: int = 640
    prefix_output_len: int = 32
    disturbed_streams: int = 16
    long_len: int = 1408
    idle_s: float = 2.0
    open_streams: int = 1000
    open_input_len: int = 32
    open_output_len: int = 16
    seed: int = 0
    vocab_size: int = 30_000

    @property
    def context(self) -> int:
        """Tokens that one request may have; the streams beside a long prompt take all of it."""
        longest = max(
            self.input_len + self.output_len,
            self.input_len + self.exponential_cap,
            self.prefix_len + self.prefix_output_len,
            self.long_len + 1,
            self.open_input_len + self.open_output_len,
        )
        return -(-(longest + 1) // CONTEXT_STEP) * CONTEXT_STEP

    @property
    def most_streams(self) -> int:
        """Requests that are in flight at once, at most, but for the open ones."""
        return max(*self.streams, self.batch_streams, self.disturbed_streams)

    def warm_up(self, kind: PromptKind) -> list[PlannedRequest]:
        """Requests that every side gets first, uncounted."""
        lengths = [self.input_len] * min(WARMUP_REQUESTS, self.most_streams)
        prompts = self._prompts(lengths, -1, 0, kind)
        return [PlannedRequest(prompt=p, output_len=WARMUP_OUTPUT) for p in prompts]

    def workloads(self, round_number: int, kind: PromptKind) -> list[Workload]:
        """The workloads of a round, the gentlest first; no prompt is sent in two rounds.

        Args:
            round_number: from 0 on.
            kind: of the prompts.
        """
        makers: dict[WorkloadKind, Callable[[int, PromptKind], list[Workload]]] = {
            "streams": self._streams,
            "exponential": self._exponential,
            "prefix": self._prefix,
            "prefill": self._prefill,
            "long-prompt": self._long_prompt,
            "open": self._open,
        }
        return [
            workload
            for name, make in makers.items()
            if name in self.kinds
            for workload in make(round_number, kind)
        ]

    def _streams(self, round_number: int, kind: PromptKind) -> list[Workload]:
        workloads = []
        for position, concurrency in enumerate(self.streams):
            lengths = [self.input_len] * self._count(concurrency)
            prompts = self._prompts(lengths, round_number, 10 + position, kind)
            workloads.append(
                Workload(
                    name=stream_name(concurrency),
                    kind="streams",
                    concurrency=concurrency,
                    requests=equal(prompts, self.output_len),
                )
            )
        return workloads

    def _exponential(self, round_number: int, kind: PromptKind) -> list[Workload]:
        count = self._count(self.batch_streams)
        config = LengthConfig(
            kind="exponential", mean=self.exponential_mean, cap=self.exponential_cap
        )
        output_lens = draw_lengths(config, count, self.seed + round_number)
        prompts = self._prompts([self.input_len] * count, round_number, 1, kind)
        requests = [
            PlannedRequest(prompt=prompt, output_len=output_len)
            for prompt, output_len in zip(prompts, output_lens, strict=True)
        ]
        return [self._batch("exponential", requests)]

    def _prefix(self, round_number: int, kind: PromptKind) -> list[Workload]:
        shared_len = int(PREFIX_SHARE * self.prefix_len)
        lengths = [self.prefix_len] * self._count(self.batch_streams)
        prompts = self._prompts(lengths, round_number, 2, kind, shared_len)
        return [self._batch("prefix", equal(prompts, self.prefix_output_len))]

    def _prefill(self, round_number: int, kind: PromptKind) -> list[Workload]:
        lengths = [self.input_len] * self._count(self.batch_streams)
        prompts = self._prompts(lengths, round_number, 3, kind)
        return [self._batch("prefill", equal(prompts, 1))]

    def _long_prompt(self, round_number: int, kind: PromptKind) -> list[Workload]:
        lengths = [self.input_len] * self.disturbed_streams
        streams = self._prompts(lengths, round_number, 4, kind)
        (long_prompt,) = self._prompts([self.long_len], round_number, 5, kind)
        requests = equal(streams, self.context - 2 * self.input_len)
        requests.append(PlannedRequest(prompt=long_prompt, output_len=1))
        return [
            Workload(
                name="long-prompt",
                kind="long-prompt",
                concurrency=self.disturbed_streams,
                requests=requests,
            )
        ]

    def _open(self, round_number: int, kind: PromptKind) -> list[Workload]:
        prompts = self._prompts([self.open_input_len] * self.open_streams, round_number, 6, kind)
        requests = equal(prompts, self.open_output_len)
        return [Workload(name="open", kind="open", concurrency=None, requests=requests)]

    def _batch(self, kind: WorkloadKind, requests: Sequence[PlannedRequest]) -> Workload:
        return Workload(name=kind, kind=kind, concurrency=self.batch_streams, requests=requests)

    def _count(self, concurrency: int) -> int:
        return max(MIN_REQUESTS, self.requests_per_stream * concurrency)

    def _prompts(
        self,
        lengths: Sequence[int],
        round_number: int,
        workload_number: int,
        kind: PromptKind,
        shared_prefix_len: int = 0,
    ) -> list[Prompt]:
        """Prompts of a workload; the shared part of each round's is another one, too."""
        return plan_prompts(
            lengths,
            seed=self.seed + round_number,
            vocab_size=self.vocab_size,
            first_index=NUMBERS * workload_number,
            shared_prefix_len=shared_prefix_len,
            kind=kind,
        )


def stream_name(concurrency: int) -> str:
    """Name of the workload with so many streams of equal lengths."""
    return f"{concurrency} stream{'s' if concurrency > 1 else ''}"


def equal(prompts: Sequence[Prompt], output_len: int) -> list[PlannedRequest]:
    """Requests for outputs of one length."""
    return [PlannedRequest(prompt=prompt, output_len=output_len) for prompt in prompts]
