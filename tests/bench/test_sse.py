import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.sse import EventStreamParser


def parse(*chunks: bytes) -> list[bytes]:
    parser = EventStreamParser()
    return [data for chunk in chunks for data in parser.feed(chunk)]


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\r\n\r\ndata: b\r\rdata: c\n\n", [b"a", b"b", b"c"]),
        (b"data:a\n\n", [b"a"]),  # one space after the colon is optional
        (b"data:  a\n\n", [b" a"]),  # and only one belongs to the grammar
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data\n\ndata: a\n\n", [b"a"]),  # a field without a colon has an empty value
        (b": keep-alive\n\ndata: a\n\n:\n\n", [b"a"]),
        (b": keep-alive\ndata: a\n\n", [b"a"]),  # a comment glued to an event hides nothing
        (b"event: x\nid: 7\nretry: 10\ndata: a\n\n", [b"a"]),
        (b"event: x\n\n", []),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"data: a\n", []),  # cut off: the blank line never came
        (b"data: \xe2\x80\xa8\x0b\x85\n\n", [b"\xe2\x80\xa8\x0b\x85"]),  # not line ends here
        (b"", []),
        (b"\n\n\ndata: a\n\n\n\n", [b"a"]),
    ],
)
def test_events_follow_the_grammar_wherever_the_stream_is_cut(stream: bytes, expected: list[bytes]):
    assert parse(stream) == expected
    assert parse(*(stream[i : i + 1] for i in range(len(stream)))) == expected
    for cut in range(len(stream)):
        assert parse(stream[:cut], stream[cut:]) == expected


def test_an_event_is_delivered_with_the_read_that_completes_it():
    parser = EventStreamParser()
    assert parser.feed(b"data: a") == []
    assert parser.feed(b"\n") == []
    assert parser.feed(b"\ndata: b\r") == [b"a"]
    assert parser.feed(b"\n\r") == [b"b"]
    assert parser.feed(b"\n") == []


@given(
    st.lists(st.binary(min_size=1).filter(lambda data: not set(data) & {10, 13}), max_size=5),
    st.sampled_from([b"\n", b"\r", b"\r\n"]),
    st.lists(st.integers(0, 200), max_size=6),
)
def test_written_events_are_read_back_however_they_are_split(
    payloads: list[bytes], line_end: bytes, cuts: list[int]
):
    stream = b"".join(b"data: " + data + line_end + line_end for data in payloads)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    chunks = [stream[a:b] for a, b in itertools.pairwise(edges)]
    assert parse(*chunks) == payloads
