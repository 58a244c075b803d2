"""The workloads that batching policies are compared on: seeded, and the same for each of them."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from bench.lengths import LengthConfig, LengthKind, Potential, draw_lengths, find_potential
from bench.scenario import PlannedRequest, plan_prompts
from bench.workload import Prompt, arrival_times

__all__ = ["ArrivalKind", "PolicyPlan", "Workload"]

ArrivalKind = Literal["burst", "poisson"]

# Prompts of one workload lie this far from those of the next, so that none is sent twice.
INDEX_STRIDE = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One cell of the comparison.

    Attributes:
        lengths: distribution of the output lengths.
        arrivals: all at once, or a Poisson process.
    """

    lengths: LengthKind
    arrivals: ArrivalKind

    @property
    def name(self) -> str:
        return f"{self.lengths}, {'burst' if self.arrivals == 'burst' else 'Poisson'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyPlan:
    """All workloads of a comparison.

    Attributes:
        batch_size: rows of the engine, and requests of a full batch.
        num_batches: requests are so many full batches, so that a static one always fills.
        output_mean, output_cap: of the output lengths.
        input_min, input_max: prompt lengths are uniform between.
        lengths, arrivals: the workloads are their combinations.
        request_rate: of the Poisson arrivals; None takes `load_share` of the rate at which
            continuous batching worked off the burst of the same lengths.
        vocab_size: token ids of the prompts are below it.
        seed: of lengths, prompts and arrivals.
    """

    batch_size: int = 32
    num_batches: int = 8
    output_mean: int = 48
    output_cap: int = 384
    input_min: int = 16
    input_max: int = 128
    lengths: tuple[LengthKind, ...] = get_args(LengthKind)
    arrivals: tuple[ArrivalKind, ...] = get_args(ArrivalKind)
    request_rate: float | None = None
    load_share: float = 0.8
    vocab_size: int = 30_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.num_batches < 1:
            raise ValueError(f"{self.batch_size=} and {self.num_batches=} must be positive")
        if not 1 <= self.input_min <= self.input_max:
            raise ValueError(f"{self.input_min=} must be at least 1, at most {self.input_max=}")
        if "burst" not in self.arrivals and self.request_rate is None:
            raise ValueError("Poisson arrivals without a burst before need a request rate")
        self.length_config("uniform")

    @property
    def num_requests(self) -> int:
        """Requests of each workload."""
        return self.batch_size * self.num_batches

    def workloads(self) -> Iterator[Workload]:
        """All of them; the burst of some lengths before their Poisson arrivals."""
        for lengths in self.lengths:
            for arrivals in sorted(self.arrivals):
                yield Workload(lengths=lengths, arrivals=arrivals)

    def length_config(self, kind: LengthKind) -> LengthConfig:
        """The distribution of the output lengths."""
        return LengthConfig(kind=kind, mean=self.output_mean, cap=self.output_cap)

    def output_lens(self, kind: LengthKind, count: int | None = None) -> list[int]:
        """The output lengths in order of arrival; those of more requests begin with the same."""
        return draw_lengths(self.length_config(kind), count or self.num_requests, self.seed)

    def potential(self, kind: LengthKind) -> Potential:
        """What continuous batching could gain on these lengths."""
        return find_potential(self.output_lens(kind), self.batch_size)

    def requests(
        self,
        kind: LengthKind,
        *,
        rate: float | None,
        part: int,
        count: int | None = None,
    ) -> list[PlannedRequest]:
        """Plan a workload.

        Args:
            kind: of the output lengths.
            rate: of Poisson arrivals; None lets all come at once.
            part: number of the workload on its server; another one has other prompts.
            count: of requests, if not as many as a workload has.
        """
        output_lens = self.output_lens(kind, count)
        source = random.Random(f"{self.seed}/inputs")
        input_lens = [source.randint(self.input_min, self.input_max) for _ in output_lens]
        prompts = self.prompts(input_lens, part)
        arrivals_s = itertools.repeat(0.0) if rate is None else arrival_times(rate, 1.0, self.seed)
        return [
            PlannedRequest(prompt=prompt, output_len=output_len, arrival_s=arrival_s)
            for prompt, output_len, arrival_s in zip(prompts, output_lens, arrivals_s, strict=False)
        ]

    def warmup(self, part: int) -> list[PlannedRequest]:
        """One full batch of short requests."""
        prompts = self.prompts([self.input_min] * self.batch_size, part)
        return [PlannedRequest(prompt=prompt, output_len=2) for prompt in prompts]

    def prompts(self, input_lens: Sequence[int], part: int) -> list[Prompt]:
        """The prompts of a part."""
        return plan_prompts(
            input_lens,
            seed=self.seed,
            vocab_size=self.vocab_size,
            first_index=part * INDEX_STRIDE,
        )

    def probe_count(self, rate: float, seconds: float, min_batches: int) -> int:
        """Requests of a probe: so many seconds of arrivals, in full batches."""
        num_batches = max(min_batches, math.ceil(rate * seconds / self.batch_size))
        return num_batches * self.batch_size
