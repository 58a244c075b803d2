import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.stream_buffer import PlainBuffer, ResumeBuffer, ResumeGap
from gateway.token_logprobs import TokenLogprob, TopLogprob


def kept(*, max_bytes: int = 1_000_000) -> ResumeBuffer:
    return ResumeBuffer(max_bytes=max_bytes, on_growth=lambda growth: None)


def entry(token: str) -> TokenLogprob:
    alternative = TopLogprob(token="x", logprob=-0.1, bytes=(120,))
    return TokenLogprob(token=token, logprob=-1 / 3, bytes=None, top_logprobs=(alternative,))


@pytest.mark.parametrize("make", [PlainBuffer, kept])
def test_what_is_put_comes_out_merged_and_numbered(make):
    buffer = make()
    assert not buffer.num_unsent_bytes
    buffer.put("a", (1,))
    buffer.put("é€😀", (2, 3))
    assert buffer.num_unsent_bytes
    assert buffer.take() == (0, "aé€😀", [1, 2, 3], [])
    buffer.put("", (4,), [entry("b"), entry("c")])
    buffer.put("", (), [entry("d")])
    assert buffer.take() == (1, "", [4], [entry("b"), entry("c"), entry("d")])
    assert (buffer.num_unsent_bytes, buffer.next_seq) == (0, 2)


@pytest.mark.parametrize("make", [PlainBuffer, kept])
def test_what_is_unsent_is_counted(make):
    buffer = make()
    buffer.put("", (), [])
    assert buffer.num_unsent_bytes == 0
    buffer.put("é", (1, 2))
    assert buffer.num_unsent_bytes == 2 + 2 * 4
    buffer.put("", (), [entry("b")])
    assert buffer.num_unsent_bytes > 2 + 2 * 4
    buffer.take()
    assert buffer.num_unsent_bytes == 0


def test_after_a_rewind_one_delta_holds_everything_and_has_the_number_of_the_last():
    buffer = kept()
    for n, text in enumerate(("a", "b", "c")):
        buffer.put(text, (n,))
        buffer.take()
    buffer.rewind(0)
    assert buffer.take() == (2, "bc", [1, 2], [])
    buffer.rewind(2)
    assert not buffer.num_unsent_bytes
    buffer.rewind(-1)
    buffer.put("d", (3,))
    assert buffer.take() == (3, "abcd", [0, 1, 2, 3], [])
    assert buffer.next_seq == 4


@pytest.mark.parametrize("after", [-2, 3, 10**15])
def test_a_number_that_was_never_given_is_a_gap(after):
    buffer = kept()
    for text in ("a", "b", "c"):
        buffer.put(text, ())
        buffer.take()
    with pytest.raises(ResumeGap):
        buffer.rewind(after)


def test_the_oldest_deltas_are_forgotten_first_and_never_what_is_unsent():
    buffer = kept(max_bytes=200)
    for n in range(100):
        buffer.put("x", (n,))
        buffer.take()
    assert buffer.num_bytes <= 200
    with pytest.raises(ResumeGap):
        buffer.rewind(-1)
    buffer.rewind(97)
    assert buffer.take() == (99, "xx", [98, 99], [])
    buffer.put("y" * 1000, ())
    assert buffer.num_unsent_bytes == 1000
    assert buffer.take() == (100, "y" * 1000, [], [])
    buffer.rewind(100)  # whoever has it all can always go on


def test_forgetting_what_was_sent_spares_what_is_to_be_sent_again():
    buffer = kept()
    for n in range(4):
        buffer.put("x" if n == 0 else "", (n,))  # half a character has ids and no text
        buffer.take()
    buffer.rewind(1)
    buffer.forget_sent()
    assert buffer.take() == (3, "", [2, 3], [])
    buffer.rewind(1)
    with pytest.raises(ResumeGap):
        buffer.rewind(0)


def test_a_cleared_buffer_holds_nothing_and_takes_nothing():
    sizes = []
    buffer = ResumeBuffer(max_bytes=1000, on_growth=sizes.append)
    buffer.put("text", (1, 2))
    buffer.take()
    buffer.put("more", (3,))
    buffer.clear()
    buffer.put("late", (4,))
    assert not buffer.num_unsent_bytes
    assert buffer.num_bytes == sum(sizes) == 0
    with pytest.raises(ResumeGap):
        buffer.rewind(0)


@given(
    pieces=st.lists(st.text(max_size=4), min_size=1, max_size=30),
    takes=st.sets(st.integers(0, 29)),
    after=st.integers(-1, 29),
    max_bytes=st.integers(1, 300),
)
def test_a_rewind_gives_exactly_what_followed_or_a_gap(pieces, takes, after, max_bytes):
    sizes: list[int] = []
    buffer = ResumeBuffer(max_bytes=max_bytes, on_growth=sizes.append)
    deltas = []
    for n, piece in enumerate(pieces):
        buffer.put(piece, ())
        if n in takes and buffer.num_unsent_bytes:
            seq, text, *_ = buffer.take()
            assert seq == len(deltas)
            deltas.append(text)
    assert buffer.num_bytes == sum(sizes)
    try:
        buffer.rewind(after)
    except ResumeGap:
        num_bytes = len("".join(deltas).encode()) + 24 * len(deltas)
        assert after >= len(deltas) or num_bytes > max_bytes
        return
    rest = "".join(pieces)[len("".join(deltas[: after + 1])) :]
    if rest == "":
        assert not buffer.num_unsent_bytes
    else:
        seq, text, *_ = buffer.take()
        assert text == rest
        assert seq >= after + 1


def test_a_rewind_gives_the_log_probabilities_again():
    sizes: list[int] = []
    buffer = ResumeBuffer(max_bytes=10_000, on_growth=sizes.append)
    for token in "abc":
        buffer.put(token, (), [entry(token)])
        buffer.take()
    buffer.rewind(0)
    assert buffer.take() == (2, "bc", [], [entry("b"), entry("c")])
    buffer.forget_sent()
    assert buffer.num_bytes == sum(sizes) == 0
