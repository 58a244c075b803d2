import json
from collections.abc import AsyncIterator

import pytest

from bench.stream import RequestFailed, RequestRecord, measure_stream


class Script:
    """A stream whose reads come at times that the test sets, and the clock that they move."""

    def __init__(self, start_s: float = 100.0) -> None:
        self.now_s = start_s
        self.start_s = start_s
        self.reads: list[tuple[float, bytes]] = []

    def clock(self) -> float:
        return self.now_s

    def at(self, seconds: float, *events: object) -> "Script":
        """At so many seconds after the start, one read brings these events."""
        lines = [
            event if isinstance(event, bytes) else b"data: %s\n\n" % json.dumps(event).encode()
            for event in events
        ]
        self.reads.append((seconds, b"".join(lines)))
        return self

    async def chunks(self) -> AsyncIterator[bytes]:
        for seconds, data in self.reads:
            self.now_s = self.start_s + seconds
            yield data

    async def measure(self) -> RequestRecord:
        record = RequestRecord(index=0, start_s=self.start_s)
        await measure_stream(self.chunks(), record, self.clock)
        return record


DONE = b"data: [DONE]\n\n"


def text(content: str, finish_reason: str | None = None, **fields: object) -> dict:
    choice = {"index": 0, "text": content, "finish_reason": finish_reason}
    return {"choices": [choice], **fields}


def chat(delta: dict, finish_reason: str | None = None, **fields: object) -> dict:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return {"choices": [choice], **fields}


def usage(completion_tokens: int, prompt_tokens: int = 5, cached: int | None = None) -> dict:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, **details}


async def test_every_chunk_with_text_is_a_token_where_the_server_counts_nothing():
    record = await (
        Script()
        .at(0.5, text("a"))
        .at(0.75, text("b"))
        .at(1.75, text("c"))
        .at(2.0, text("", "length"), DONE)
        .measure()
    )
    assert record.first_token_s == 0.5
    assert list(record.gaps_s) == [0.25, 1.0]
    assert list(record.gap_tokens) == [1, 1]
    assert record.last_token_s == 1.75
    assert record.end_s == 2.0
    assert record.output_tokens == 3
    assert record.method == "chunks"
    assert record.finish_reason == "length"


async def test_the_role_chunk_is_not_the_first_token():
    record = await (
        Script()
        .at(0.125, chat({"role": "assistant", "content": ""}))
        .at(0.5, chat({"content": "a"}))
        .at(0.625, chat({"content": ""}, "stop"), DONE)
        .measure()
    )
    assert record.first_token_s == 0.5
    assert record.output_tokens == 1


async def test_cumulative_usage_tells_how_many_tokens_a_chunk_brought():
    record = await (
        Script()
        .at(0.25, chat({"role": "assistant", "content": ""}, usage=usage(0)))
        .at(0.5, chat({"content": "abc"}, usage=usage(3)))
        .at(1.0, chat({"content": "de"}, usage=usage(5)))
        .at(1.0, chat({}, "stop", usage=usage(5)))
        .at(1.5, {"choices": [], "usage": usage(5, cached=4)}, DONE)
        .measure()
    )
    assert record.method == "usage"
    assert record.first_token_s == 0.5
    assert record.first_tokens == 3
    assert list(record.gaps_s) == [0.5]
    assert list(record.gap_tokens) == [2]
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (5, 4, 5)
    assert record.end_s == 1.0


async def test_a_token_without_text_counts_when_usage_says_so():
    # The first half of a character: the server has a token, but no text to show yet.
    record = await (
        Script()
        .at(0.25, text("", usage=usage(1)))
        .at(0.5, text("\N{SNOWMAN}", "stop", usage=usage(2)), DONE)
        .measure()
    )
    assert record.first_token_s == 0.25
    assert list(record.gap_tokens) == [1]


async def test_token_ids_count_where_there_is_no_usage():
    chunk = text("ab")
    chunk["choices"][0]["token_ids"] = [7, 8]
    record = await Script().at(0.5, chunk).at(1.0, text("", "stop"), DONE).measure()
    assert (record.method, record.output_tokens) == ("token_ids", 2)


async def test_events_of_one_read_have_one_time():
    record = await (
        Script()
        .at(0.5, text("a"), text("b"))
        .at(1.0, text("c"), text("d"), text("e"))
        .at(1.5, text("", "stop"), DONE)
        .measure()
    )
    assert record.first_tokens == 2
    assert list(record.gaps_s) == [0.5]
    assert list(record.gap_tokens) == [3]


async def test_the_final_usage_overrules_counted_chunks():
    record = await (
        Script()
        .at(0.5, text("several tokens"))
        .at(1.0, text("", "length"), {"choices": [], "usage": usage(9)}, DONE)
        .measure()
    )
    assert record.output_tokens == 9
    assert record.method == "chunks"


async def test_keep_alives_between_chunks_change_nothing():
    record = await (
        Script()
        .at(0.25, b": keep-alive\n\n")
        .at(0.5, text("a"))
        .at(0.75, b":\n\n")
        .at(1.0, text("b", "stop"), DONE)
        .measure()
    )
    assert list(record.gaps_s) == [0.5]


async def test_reasoning_counts_as_text():
    record = await (
        Script()
        .at(0.5, chat({"reasoning_content": "hm"}))
        .at(1.0, chat({"content": "a"}, "stop"), DONE)
        .measure()
    )
    assert record.first_token_s == 0.5


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([text("a")], "cut off"),
        ([text("a"), DONE], "cut off"),
        ([text("a"), {"error": {"message": "out of memory", "code": 500}}], "error event"),
        ([b"data: {nonsense\n\n"], "bad chunk"),
        ([b"data: 3\n\n"], "bad chunk"),
        ([text("", "stop"), DONE], "no tokens"),
        ([], "cut off"),
    ],
)
async def test_a_stream_that_does_not_end_well_is_a_failure_with_a_name(events: list, kind: str):
    script = Script().at(0.5, *events)
    with pytest.raises(RequestFailed) as failure:
        await script.measure()
    assert failure.value.kind == kind


async def test_the_text_of_an_error_event_is_kept():
    with pytest.raises(RequestFailed, match="out of memory"):
        await Script().at(0.5, {"error": {"message": "out of memory"}}).measure()
