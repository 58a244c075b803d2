"""What is asked of the fleet, and when: seeded requests with lengths as others have measured them.

Sources of the lengths, in tokens:

* `azure-conversation`, `azure-code`: the Azure LLM inference trace 2023 (Patel et al., "Splitwise:
  Efficient generative LLM inference using phase splitting", ISCA 2024, section III): median prompt
  1020 and 1500, median output 129 and 13. Lognormal about these medians. The spread for
  conversations is that of 227 requests of the trace (2023-11-16 18:41 UTC: standard deviation of
  the logarithm 1.03 for prompts, 0.82 for outputs; 95 % of the prompts below 4100, where they are
  cut); the spread for code is assumed.
* `sharegpt`, `burstgpt`: quantiles of ShareGPT and of the GPT-4 conversations of BurstGPT (Wang et
  al., arXiv 2401.17644), as tabulated in Sun et al., "Llumnix: Dynamic Scheduling for Large
  Language Model Serving", OSDI 2024, table 1; interpolated between them. The ends are assumed.

Arrivals are a gamma renewal process: burstiness 1 is Poisson, below 1 comes in bursts, the form in
which BurstGPT models its traffic. Not modelled: times of day, and any correlation of prompt and
output lengths. Shared beginnings, conversations and tenants are parameters without a source.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "LENGTHS",
    "Floats",
    "Ints",
    "LengthPair",
    "Lognormal",
    "Quantiles",
    "Trace",
    "WorkloadConfig",
    "fixed_lengths",
    "make_trace",
]

type Ints = NDArray[np.int64]
type Floats = NDArray[np.float64]


class Lengths(Protocol):
    """A distribution of lengths."""

    def draw(self, source: np.random.Generator, count: int) -> Ints: ...


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lengths whose logarithm is normal, cut to [1, most]."""

    median: float
    sigma: float
    most: int

    def draw(self, source: np.random.Generator, count: int) -> Ints:
        values = source.lognormal(math.log(self.median), self.sigma, count)
        return np.clip(np.rint(values), 1, self.most).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Lengths interpolated between quantiles.

    Attributes:
        points: from share of requests, 0 and 1 included, to length.
        is_logarithmic: whether the logarithm of the length is interpolated instead.
    """

    points: Mapping[float, float]
    is_logarithmic: bool = False

    def draw(self, source: np.random.Generator, count: int) -> Ints:
        shares, lengths = list(self.points.keys()), list(self.points.values())
        uniform = source.random(count)
        if self.is_logarithmic:
            values = np.exp(np.interp(uniform, shares, np.log(lengths)))
        else:
            values = np.interp(uniform, shares, lengths)
        return np.maximum(np.rint(values), 1).astype(np.int64)


@dataclass(frozen=True, slots=True)
class LengthPair:
    """The lengths of prompts and of outputs."""

    prompts: Lengths
    outputs: Lengths


LENGTHS: Mapping[str, LengthPair] = {
    "azure-conversation": LengthPair(Lognormal(1020, 1.03, 4096), Lognormal(129, 0.82, 2048)),
    "azure-code": LengthPair(Lognormal(1500, 1.0, 8192), Lognormal(13, 1.0, 1024)),
    "sharegpt": LengthPair(
        Quantiles({0: 4, 0.5: 74, 0.8: 348, 0.95: 1484, 0.99: 3388, 1: 4096}, is_logarithmic=True),
        Quantiles({0: 1, 0.5: 487, 0.8: 781, 0.95: 988, 0.99: 1234, 1: 1500}),
    ),
    "burstgpt": LengthPair(
        Quantiles(
            {0: 8, 0.5: 582, 0.8: 1427, 0.95: 2345, 0.99: 3549, 1: 4096}, is_logarithmic=True
        ),
        Quantiles({0: 1, 0.5: 243, 0.8: 434, 0.95: 669, 0.99: 964, 1: 1200}),
    ),
}


def fixed_lengths(prompt: int, output: int) -> LengthPair:
    """Every request the same."""
    return LengthPair(Quantiles({0: prompt, 1: prompt}), Quantiles({0: output, 1: output}))


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadConfig:
    """One workload.

    Attributes:
        request_rate: requests per second to the whole fleet; infinite: all at once.
        burstiness: shape of the gamma-distributed gaps; 1 is Poisson, below comes in bursts.
        num_groups: system prompts; which one a conversation has follows Zipf's law.
        shared_prefix_len: their length. It comes on top of the drawn prompt.
        turns: mean requests of a conversation (geometric). Later ones begin with all that came
            before, add a new message, and come `think_s` (mean, exponential) after the answer
            would be complete at `assumed_itl_s`. At the start, others are under way already.
        num_tenants: they share the requests evenly but for the first, which has `heavy_share`.
        urgent_share: of the requests, with priority -1 instead of 0.
        max_model_len: most tokens of prompt and output: prompts are cut, conversations end.
    """

    num_requests: int
    request_rate: float
    lengths: LengthPair = field(default_factory=lambda: LENGTHS["azure-conversation"])
    burstiness: float = 1.0
    num_groups: int = 1
    shared_prefix_len: int = 0
    turns: float = 1.0
    think_s: float = 30.0
    assumed_itl_s: float = 0.02
    num_tenants: int = 1
    heavy_share: float | None = None
    urgent_share: float = 0.0
    max_model_len: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests < 1 or self.num_groups < 1 or self.num_tenants < 1:
            raise ValueError("a workload has at least one request, one group and one tenant")
        if not self.request_rate > 0 or not self.burstiness > 0:
            raise ValueError(f"{self.request_rate=} and {self.burstiness=} must be positive")
        if not self.turns >= 1:
            raise ValueError(f"{self.turns=} must be at least 1")
        if not 0 <= self.urgent_share <= 1 or not 0 <= (self.heavy_share or 0) <= 1:
            raise ValueError("shares of requests are between 0 and 1")
        if not 0 <= self.shared_prefix_len <= self.max_model_len - 2:
            raise ValueError(f"{self.shared_prefix_len=} leaves no room in {self.max_model_len=}")


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival; a column per property.

    Attributes:
        arrival_s: seconds after the start.
        prompt_len, output_len: tokens.
        prefix_len: how many of a prompt's first tokens are those of its group.
        group: which system prompt.
        session: which conversation; the rest of the prompt, and the output, belong to it.
        tenant, priority: as in the request.
    """

    arrival_s: Floats
    prompt_len: Ints
    output_len: Ints
    prefix_len: Ints
    group: Ints
    session: Ints
    tenant: Ints
    priority: Ints

    def __len__(self) -> int:
        return len(self.arrival_s)

    def take(self, indices: Ints) -> "Trace":
        """Some of the requests, in the order given."""
        return Trace(
            arrival_s=self.arrival_s[indices],
            prompt_len=self.prompt_len[indices],
            output_len=self.output_len[indices],
            prefix_len=self.prefix_len[indices],
            group=self.group[indices],
            session=self.session[indices],
            tenant=self.tenant[indices],
            priority=self.priority[indices],
        )

    @property
    def columns(self) -> tuple[Floats, Ints, Ints, Ints, Ints, Ints, Ints, Ints]:
        return (
            self.arrival_s,
            self.prompt_len,
            self.output_len,
            self.prefix_len,
            self.group,
            self.session,
            self.tenant,
            self.priority,
        )


def make_trace(config: WorkloadConfig) -> Trace:
    """Draw a workload. The same config gives the same requests."""
    source = np.random.default_rng(config.seed)
    count = config.num_requests
    turns = draw_turns(source, config)
    session = np.repeat(np.arange(len(turns)), turns)[:count]
    turn = np.arange(count) - np.repeat(np.cumsum(turns) - turns, turns)[:count]
    own_len = config.lengths.prompts.draw(source, count)
    later = turn > 0
    # What a user adds to a conversation is short, whatever its first prompt was.
    own_len[later] = LENGTHS["sharegpt"].prompts.draw(source, count)[later]
    output_len = config.lengths.outputs.draw(source, count)
    prompt_len, output_len = fit_lengths(config, turn, own_len, output_len)
    num_sessions = int(session[-1]) + 1
    ranks = np.arange(1, config.num_groups + 1)
    popularity = (1 / ranks) / (1 / ranks).sum()
    group = source.choice(config.num_groups, num_sessions, p=popularity)[session]
    tenant = source.choice(config.num_tenants, num_sessions, p=tenant_shares(config))[session]
    priority = -(source.random(count) < config.urgent_share).astype(np.int64)
    arrival_s = draw_arrivals(source, config, num_sessions, turn, output_len)
    if config.turns > 1 and math.isfinite(config.request_rate):
        arrival_s, session = wrap(arrival_s, session, count / config.request_rate)
    order = np.argsort(arrival_s, kind="stable")
    return Trace(
        arrival_s=arrival_s,
        prompt_len=prompt_len,
        output_len=output_len,
        prefix_len=np.full(count, config.shared_prefix_len),
        group=group,
        session=session,
        tenant=tenant,
        priority=priority,
    ).take(order)


def draw_turns(source: np.random.Generator, config: WorkloadConfig) -> Ints:
    """How many requests each conversation has, until there are enough."""
    if config.turns == 1:
        return np.ones(config.num_requests, dtype=np.int64)
    turns = source.geometric(1 / config.turns, config.num_requests)
    enough = int(np.searchsorted(np.cumsum(turns), config.num_requests)) + 1
    return turns[:enough].astype(np.int64)


def fit_lengths(
    config: WorkloadConfig, turn: Ints, own_len: Ints, output_len: Ints
) -> tuple[Ints, Ints]:
    """Prompt lengths with all that came before, and both cut to the context."""
    output_len = np.minimum(output_len, config.max_model_len - config.shared_prefix_len - 1)
    prompts, outputs = own_len.tolist(), output_len.tolist()
    history = 0
    for index, is_later in enumerate((turn > 0).tolist()):
        base = history if is_later else config.shared_prefix_len
        room = config.max_model_len - outputs[index]
        if base >= room:  # the conversation is full: its client drops what was said
            base = config.shared_prefix_len
        prompts[index] = max(min(base + prompts[index], room), 1)
        history = prompts[index] + outputs[index]
    return np.array(prompts, dtype=np.int64), np.array(outputs, dtype=np.int64)


def tenant_shares(config: WorkloadConfig) -> Floats:
    """The share of each tenant in the requests."""
    shares = np.full(config.num_tenants, 1 / config.num_tenants)
    if config.heavy_share is not None and config.num_tenants > 1:
        shares[:] = (1 - config.heavy_share) / (config.num_tenants - 1)
        shares[0] = config.heavy_share
    return shares


def draw_arrivals(
    source: np.random.Generator,
    config: WorkloadConfig,
    num_sessions: int,
    turn: Ints,
    output_len: Ints,
) -> Floats:
    """When each request arrives: conversations by a gamma process, turns after their answers."""
    if math.isinf(config.request_rate):
        return np.zeros(len(turn))
    rate = config.request_rate * num_sessions / len(turn)
    gaps_s = source.gamma(config.burstiness, 1 / (rate * config.burstiness), num_sessions)
    starts_s: Floats = np.cumsum(gaps_s) - gaps_s[0]
    if config.turns == 1:
        return starts_s
    pauses_s = source.exponential(config.think_s, len(turn))
    pauses_s[1:] += output_len[:-1] * config.assumed_itl_s
    is_first = turn == 0
    elapsed_s = np.cumsum(np.where(is_first, 0.0, pauses_s))
    session = np.cumsum(is_first) - 1
    arrival_s: Floats = starts_s[session] + elapsed_s - elapsed_s[is_first][session]
    return arrival_s


def wrap(arrival_s: Floats, session: Ints, duration_s: float) -> tuple[Floats, Ints]:
    """Move what comes after the end to the beginning, as conversations that were under way.

    So the rate is the same from the first second to the last. What has been moved belongs to a
    conversation of its own, whose past was never seen.
    """
    laps = np.floor(arrival_s / duration_s).astype(np.int64)
    return arrival_s - laps * duration_s, session + laps * (int(session[-1]) + 1)
