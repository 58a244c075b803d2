"""Figures of one load level, from the records of its requests."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.stream import RequestRecord

__all__ = ["Distribution", "Goodput", "LoadLevel", "LoadSummary", "percentile", "summarize"]


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of an ascending sequence lies, interpolated linearly."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of_seconds(cls, values: Iterable[float]) -> "Distribution | None":
        """The distribution of values given in seconds; None of no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(
            mean=1e3 * sum(ordered) / len(ordered),
            p50=1e3 * percentile(ordered, 0.50),
            p90=1e3 * percentile(ordered, 0.90),
            p99=1e3 * percentile(ordered, 0.99),
            max=1e3 * ordered[-1],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """What a request must keep to count as good: None means no demand. Milliseconds."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Goodput":
        """From "ttft:500,itl:50".

        Raises:
            ValueError: an unknown name, or no number.
        """
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition(":")
            if name not in ("ttft", "itl", "e2e"):
                raise ValueError(f"{part.strip()!r} must be ttft:MS, itl:MS or e2e:MS")
            try:
                limits[f"{name}_ms"] = float(value)
            except ValueError:
                raise ValueError(f"{part.strip()!r} has no number of milliseconds") from None
        return cls(**limits)

    def holds(self, record: RequestRecord) -> bool:
        """Whether a request met every demand; its mean ITL is what counts."""
        observed_and_limits = (
            (record.first_token_s, self.ttft_ms),
            (mean_itl_s(record), self.itl_ms),
            (record.end_s, self.e2e_ms),
        )
        return record.error is None and all(
            limit is None or observed is None or 1e3 * observed <= limit
            for observed, limit in observed_and_limits
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadLevel:
    """One load: a closed loop has a concurrency, an open one a rate of arrivals per second.

    With neither, all requests arrive at once.
    """

    concurrency: int | None = None
    request_rate: float | None = None
    burstiness: float = 1.0

    @property
    def name(self) -> str:
        """For a table."""
        if self.request_rate is not None:
            return f"{self.request_rate:g} req/s"
        if self.concurrency is None:
            return "burst"
        return f"{self.concurrency} streams"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSummary:
    """The figures of one load level. Rates count the successful requests, over the whole duration.

    Attributes:
        duration_s: from the first start to the last end.
        errors: failures by kind.
        short_outputs: successful requests that brought another number of tokens than asked for.
        itl_ms: time per token after the first read: a gap that brought n tokens counts as n gaps
            of an n-th each.
        chunk_gap_ms: time between token-bearing reads, which is what a reader sees.
        tpot_ms: per request, time from first to last token over the tokens after the first.
        token_count_method: the least exact rule that was needed (see bench/stream.py).
        client_lag_ms: how late the client sent, in an open loop.
        client_cpu_share: CPU time of the client over the duration; 1 is one core.
        goodput_per_s: good requests per second; None without a demand.
    """

    level: LoadLevel
    num_requests: int
    num_failed: int
    errors: dict[str, int]
    error_example: str | None
    duration_s: float
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    short_outputs: int
    output_tokens_per_s: float
    total_tokens_per_s: float | None
    requests_per_s: float
    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    tpot_ms: Distribution | None
    chunk_gap_ms: Distribution | None
    e2e_ms: Distribution | None
    tokens_per_chunk: float | None
    token_count_method: str | None
    client_lag_ms: Distribution | None
    client_cpu_share: float
    goodput_per_s: float | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def mean_itl_s(record: RequestRecord) -> float | None:
    """Seconds per token after the first read; None where there was only one."""
    if not record.gap_tokens:
        return None
    return sum(record.gaps_s) / sum(record.gap_tokens)


def per_token_gaps(records: Iterable[RequestRecord]) -> Iterable[float]:
    """Each gap as often as it brought tokens, divided among them."""
    for record in records:
        for gap_s, num_tokens in zip(record.gaps_s, record.gap_tokens, strict=True):
            share_s = gap_s / num_tokens
            for _ in range(num_tokens):
                yield share_s


def total(values: Iterable[int | None]) -> int | None:
    """The sum, or None when the server did not tell every one."""
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def time_per_output_token(record: RequestRecord) -> float | None:
    """Time from first to last token over the tokens after the first; None for a single token."""
    if record.output_tokens < 2 or record.first_token_s is None or record.last_token_s is None:
        return None
    return (record.last_token_s - record.first_token_s) / (record.output_tokens - 1)


def least_exact_method(records: Iterable[RequestRecord]) -> str | None:
    """The rule that the token counts of the whole level rest on."""
    used = {record.method for record in records if record.method}
    return next((name for name in ("chunks", "token_ids", "usage") if name in used), None)


def summarize(
    level: LoadLevel,
    records: Sequence[RequestRecord],
    *,
    output_len: int | None,
    client_cpu_s: float,
    goodput: Goodput | None = None,
) -> LoadSummary:
    """Turn the records of one load level into its figures.

    Args:
        level: the load.
        records: one per request, warm-up excluded; at least one.
        output_len: tokens that each request asked for; None if they differ and the sender checks.
        client_cpu_s: CPU time that the client used meanwhile.
        goodput: demands to count good requests by.
    """
    good = [record for record in records if record.error is None]
    start_s = min(record.start_s for record in records)
    end_s = max(record.start_s + (record.end_s or 0.0) for record in records)
    duration_s = max(end_s - start_s, 1e-9)
    output_tokens = sum(record.output_tokens for record in good)
    prompt_tokens = total(record.prompt_tokens for record in good)
    num_reads = sum(1 + len(record.gaps_s) for record in good)
    errors = Counter(record.error for record in records if record.error is not None)
    return LoadSummary(
        level=level,
        num_requests=len(records),
        num_failed=len(records) - len(good),
        errors=dict(errors),
        error_example=next((r.error_detail for r in records if r.error is not None), None),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=total(record.cached_tokens for record in good),
        output_tokens=output_tokens,
        short_outputs=sum(output_len not in (None, record.output_tokens) for record in good),
        output_tokens_per_s=output_tokens / duration_s,
        total_tokens_per_s=(
            None if prompt_tokens is None else (prompt_tokens + output_tokens) / duration_s
        ),
        requests_per_s=len(good) / duration_s,
        ttft_ms=Distribution.of_seconds(
            r.first_token_s for r in good if r.first_token_s is not None
        ),
        itl_ms=Distribution.of_seconds(per_token_gaps(good)),
        tpot_ms=Distribution.of_seconds(
            tpot_s for r in good if (tpot_s := time_per_output_token(r)) is not None
        ),
        chunk_gap_ms=Distribution.of_seconds(gap_s for r in good for gap_s in r.gaps_s),
        e2e_ms=Distribution.of_seconds(r.end_s for r in good if r.end_s is not None),
        tokens_per_chunk=output_tokens / num_reads if num_reads else None,
        token_count_method=least_exact_method(good),
        client_lag_ms=(
            Distribution.of_seconds(r.lag_s for r in records)
            if level.request_rate is not None
            else None
        ),
        client_cpu_share=client_cpu_s / duration_s,
        goodput_per_s=(None if goodput is None else sum(map(goodput.holds, records)) / duration_s),
    )
