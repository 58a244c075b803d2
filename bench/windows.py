"""What came within a window of time, from records of requests that may go on beyond it."""

from collections.abc import Iterable, Iterator

from bench.stream import RequestRecord

__all__ = ["gaps_between", "output_tokens_between", "prompts_between"]


def token_times(record: RequestRecord) -> Iterator[tuple[float, int]]:
    """When tokens came, on the clock of the run, and how many."""
    if record.first_token_s is None:
        return
    now_s = record.start_s + record.first_token_s
    yield now_s, record.first_tokens
    for gap_s, num_tokens in zip(record.gaps_s, record.gap_tokens, strict=True):
        now_s += gap_s
        yield now_s, num_tokens


def output_tokens_between(records: Iterable[RequestRecord], start_s: float, end_s: float) -> int:
    """Output tokens that came from `start_s` on and before `end_s`."""
    return sum(
        num_tokens
        for record in records
        for now_s, num_tokens in token_times(record)
        if start_s <= now_s < end_s
    )


def prompts_between(
    records: Iterable[RequestRecord], start_s: float, end_s: float
) -> list[RequestRecord]:
    """The requests whose prompts were done then: the first token came in the window."""
    return [
        record
        for record in records
        if record.first_token_s is not None
        and start_s <= record.start_s + record.first_token_s < end_s
    ]


def gaps_between(
    records: Iterable[RequestRecord], start_s: float, end_s: float, *, touching: bool = False
) -> list[float]:
    """Seconds between tokens within a window; a gap that brought n tokens counts as n n-ths.

    Args:
        records: of streams.
        start_s: begin of the window.
        end_s: its end.
        touching: also gaps that begin before it or end after it.
    """
    gaps: list[float] = []
    for record in records:
        before_s: float | None = None
        for now_s, num_tokens in token_times(record):
            if before_s is not None and (
                (before_s < end_s and now_s > start_s)
                if touching
                else (before_s >= start_s and now_s <= end_s)
            ):
                gaps += [(now_s - before_s) / num_tokens] * num_tokens
            before_s = now_s
    return gaps
