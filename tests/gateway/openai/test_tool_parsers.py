import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai import tool_parsers
from gateway.openai.tool_parsers import (
    AnswerParser,
    CallArguments,
    CallStart,
    EndOfText,
    PartSink,
    PlainAnswer,
    ReasoningText,
    ReplyText,
    read_plain,
    read_text,
)

MARKS = ["<a>", "<ab>"]


def until_a_mark(source, sink):
    while True:
        mark, space = yield from read_text(source, sink.reply, MARKS)
        sink.reasoning(mark + space)


def parse(reader, *pieces):
    parser = AnswerParser(reader)
    return [part for piece in pieces for part in parser.push(piece)] + parser.finish()


def test_neighbours_of_a_kind_are_one_part():
    sink = PartSink()
    for char in "ab":
        sink.reply(char)
    sink.call("f")
    for char in "{}":
        sink.arguments(char)
    sink.call("g")
    sink.arguments("{}")
    assert sink.take() == [
        ReplyText("ab"),
        CallStart(0, "f"),
        CallArguments(0, "{}"),
        CallStart(1, "g"),
        CallArguments(1, "{}"),
    ]
    assert sink.take() == []


def test_calls_beyond_the_most_allowed_are_dropped_and_so_is_what_follows():
    sink = PartSink(max_calls=1)
    sink.reply("a")
    sink.call("f")
    sink.arguments("{}")
    sink.call("g")
    sink.arguments("{}")
    sink.reply("b")
    assert sink.take() == [ReplyText("a"), CallStart(0, "f"), CallArguments(0, "{}")]
    assert sink.num_calls == 2


def test_plain_text_is_given_as_it_comes():
    parser = AnswerParser(read_plain)
    assert parser.push("a <") == [ReplyText("a <")]
    assert parser.push(" ") == [ReplyText(" ")]
    assert parser.finish() == []


def test_an_answer_that_needs_no_parser_is_text():
    answer = PlainAnswer()
    assert (answer.push("<a>"), answer.push(""), answer.finish()) == ([ReplyText("<a>")], [], [])
    assert answer.num_calls == 0


def test_only_what_may_begin_a_mark_and_the_space_before_it_is_held_back():
    parser = AnswerParser(until_a_mark)
    assert parser.push("x  ") == [ReplyText("x")]
    assert parser.push("y <") == [ReplyText("  y")]
    assert parser.push("a") == []
    assert parser.push("c") == [ReplyText(" <ac")]
    assert parser.push("\n<a>z") == [ReasoningText("<a>\n"), ReplyText("z")]


@pytest.mark.parametrize(
    ("text", "last"), [("x <a", " <a"), ("x \n", " \n"), ("<", "<"), ("<<a", "<<a")]
)
def test_what_was_held_back_comes_at_the_end(text, last):
    parser = AnswerParser(until_a_mark)
    given = parser.push(text) + parser.finish()
    assert "".join(part.text for part in given) == text
    assert given[-1].text.endswith(last[-1])


def test_finishing_twice_and_pushing_after_the_end_give_nothing():
    parser = AnswerParser(until_a_mark)
    assert parser.push("x<") + parser.finish() == [ReplyText("x"), ReplyText("<")]
    assert parser.finish() == []
    assert parser.push("y") == []


def test_a_reader_may_look_ahead_go_back_and_end():
    def reader(source, sink):
        source.start_record()
        for _ in "ab":
            yield from source.take()
        source.unread(source.record)
        assert (yield from source.peek()) == "a"
        sink.reply((yield from source.take()))
        yield from source.skip_space()

    assert parse(reader, "ab cd") == [ReplyText("a")]


def test_a_reader_that_reads_on_after_the_end_is_a_mistake():
    def reader(source, sink):
        while True:
            try:
                yield from source.take()
            except EndOfText:
                sink.reply("!")

    parser = AnswerParser(reader)
    with pytest.raises(AssertionError, match="after the end"):
        parser.finish()


def joined(parts):
    sink = PartSink()
    for part in parts:
        (sink.reply if isinstance(part, ReplyText) else sink.reasoning)(part.text)
    return sink.take()


@given(st.lists(st.text("<ab> \n", max_size=6), max_size=8))
def test_any_cut_gives_the_same_parts_and_loses_nothing(pieces):
    cut, whole = parse(until_a_mark, *pieces), parse(until_a_mark, "".join(pieces))
    assert joined(cut) == joined(whole)
    length = sum(len(part.text) for part in whole)
    assert length == len("".join(pieces))


def test_parts_do_not_grow_by_copying():
    class Piece(str):
        def __add__(self, other):
            raise AssertionError("each character would copy all before it")

    sink = PartSink()
    for give in (sink.reasoning, sink.reply):
        give(Piece("a"))
        give(Piece("b"))
    sink.call("f")
    for _ in range(2):
        sink.arguments(Piece("c"))
    assert sink.take() == [
        ReasoningText("ab"),
        ReplyText("ab"),
        CallStart(0, "f"),
        CallArguments(0, "cc"),
    ]


def test_only_so_much_of_an_answer_is_read_again(monkeypatch):
    monkeypatch.setattr(tool_parsers, "MAX_REWOUND", 3)
    rewound = []

    def reader(source, sink):
        for _ in range(3):
            source.start_record()
            for _ in "ab":
                yield from source.take()
            rewound.append(source.rewind())
        yield from read_plain(source, sink)

    assert parse(reader, "abcdef") == [ReplyText("ef")]
    assert rewound == [True, False, False]
