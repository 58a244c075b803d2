"""One streamed answer, measured: when its tokens came, how many, and how it ended.

Works on any OpenAI-compatible stream. Time runs from the caller's start to the read that brought
the bytes; everything in one read has the same time.

How many tokens a chunk brought, by the first rule that applies:
    "usage": it carries cumulative usage (`stream_options.continuous_usage_stats`);
    "token_ids": its choice lists the token ids;
    "chunks": it has text, so it counts as one token.
A role chunk brings none, so it never counts as the first token.
"""

from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from bench.sse import EventStreamParser

__all__ = ["CountMethod", "RequestFailed", "RequestRecord", "StreamMeter", "measure_stream"]

CountMethod = Literal["usage", "token_ids", "chunks"]


class RequestFailed(Exception):
    """A request that did not end as it should.

    Attributes:
        kind: the word that failures are counted by, such as "http 429" or "cut off".
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


@dataclass(slots=True)
class RequestRecord:
    """What was seen of one request. Times are seconds after its start, unless said otherwise.

    Attributes:
        index: number of its prompt.
        start_s: its start, on the clock of the run: when it was sent, or in an open loop when it
            was due.
        lag_s: how much later than due it was sent: the client's own slowness.
        first_token_s, last_token_s: reads that brought the first and the last token.
        end_s: when its end was known.
        gaps_s, gap_tokens: for each later token-bearing read, the time since the one before and
            how many tokens it brought.
        first_tokens: how many the first token-bearing read brought.
        method: how tokens were counted; None before the first.
        output_tokens: by the final usage where the server sends it, else as counted.
        retry_after: header of a refusal, as it came.
        error, error_detail: kind and text of what went wrong; None if nothing did.
    """

    index: int
    start_s: float
    lag_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float | None = None
    end_s: float | None = None
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    gap_tokens: array[int] = field(default_factory=lambda: array("L"))
    first_tokens: int = 0
    method: CountMethod | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    finish_reason: str | None = None
    retry_after: str | None = None
    error: str | None = None
    error_detail: str | None = None


class StreamMeter:
    """Takes the events of one stream and fills a record."""

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.is_done = False
        self._counted = 0

    def take(self, data: bytes, now_s: float) -> None:
        """Account for one event.

        Args:
            data: of the event.
            now_s: seconds since the start of the request at which it was read.

        Raises:
            RequestFailed: it is an error, or not a chunk.
        """
        if data == b"[DONE]":
            self.is_done = True
            return
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise RequestFailed("bad chunk", str(error)) from error
        if not isinstance(chunk, dict):
            raise RequestFailed("bad chunk", f"a JSON object was expected, got {data[:80]!r}")
        if chunk.get("error"):
            raise RequestFailed("error event", orjson.dumps(chunk["error"]).decode())
        usage = chunk.get("usage")
        for choice in chunk.get("choices") or ():
            self._take_choice(choice, usage, now_s)
        if usage:
            self._take_usage(usage)

    def finish(self) -> None:
        """The stream has ended.

        Raises:
            RequestFailed: before it was complete.
        """
        if self.record.finish_reason is None:
            raise RequestFailed("cut off", "the stream ended without a finish_reason")
        if self.record.first_token_s is None:
            raise RequestFailed("no tokens", "the stream brought no token")
        self.record.output_tokens = max(self.record.output_tokens, self._counted)

    def _take_choice(
        self, choice: dict[str, Any], usage: dict[str, Any] | None, now_s: float
    ) -> None:
        record = self.record
        num_tokens = 0
        method: CountMethod
        if usage and isinstance(usage.get("completion_tokens"), int):
            method, num_tokens = "usage", usage["completion_tokens"] - self._counted
        elif choice.get("token_ids"):
            method, num_tokens = "token_ids", len(choice["token_ids"])
        else:
            method, num_tokens = "chunks", int(has_text(choice))
        if num_tokens > 0:
            self._counted += num_tokens
            if record.first_token_s is None or record.last_token_s is None:
                record.first_token_s = now_s
                record.first_tokens = num_tokens
            elif record.last_token_s == now_s and record.gap_tokens:
                record.gap_tokens[-1] += num_tokens  # the same read
            elif record.last_token_s == now_s:
                record.first_tokens += num_tokens
            else:
                record.gaps_s.append(now_s - record.last_token_s)
                record.gap_tokens.append(num_tokens)
            record.last_token_s = now_s
            # The least exact rule that was needed names the method.
            record.method = "chunks" if "chunks" in (record.method, method) else method
        if choice.get("finish_reason"):
            record.finish_reason = choice["finish_reason"]
            record.end_s = now_s

    def _take_usage(self, usage: dict[str, Any]) -> None:
        record = self.record
        record.prompt_tokens = usage.get("prompt_tokens", record.prompt_tokens)
        record.output_tokens = usage.get("completion_tokens") or record.output_tokens
        details = usage.get("prompt_tokens_details") or {}
        record.cached_tokens = details.get("cached_tokens", record.cached_tokens)


def has_text(choice: dict[str, Any]) -> bool:
    """Whether a choice of a completion or chat chunk brings text of any kind."""
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"))


async def measure_stream(
    chunks: AsyncIterator[bytes], record: RequestRecord, clock: Callable[[], float]
) -> None:
    """Read a stream to its end and fill the record.

    Args:
        chunks: the body, as it comes from the socket.
        record: its `start_s` is on the same clock.
        clock: seconds.

    Raises:
        RequestFailed: the stream is not well-formed, carries an error or ends early.
    """
    parser = EventStreamParser()
    meter = StreamMeter(record)
    async for chunk in chunks:
        now_s = clock() - record.start_s
        for data in parser.feed(chunk):
            meter.take(data, now_s)
    meter.finish()
