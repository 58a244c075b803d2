from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import InvalidRequest
from gateway.openai.reasoning import read_reasoning, reasoning_format, thinks
from gateway.openai.tool_parsers import AnswerParser, ReasoningText, ReplyText, read_plain


def parser_of(*, is_inside=False):
    def reader(source, sink):
        yield from read_reasoning(source, sink, is_inside=is_inside)
        yield from read_plain(source, sink)

    return AnswerParser(reader)


def parse(parser, *pieces):
    thoughts, text = "", ""
    for part in [p for piece in pieces for p in parser.push(piece)] + parser.finish():
        match part:
            case ReasoningText(text=more):
                assert not text
                thoughts += more
            case ReplyText(text=more):
                text += more
    return thoughts, text


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("<think>\nHm. So.\n</think>\n\nYes. ", ("Hm. So.", "Yes. ")),
        ("\n<think>Hm</think>Yes", ("Hm", "Yes")),
        ("<think>\n\n</think>\n\nYes", ("", "Yes")),
        ("<think>a < b </ c", ("a < b </ c", "")),
        ("<think>cut off  ", ("cut off", "")),
        ("<think>a</think>b<think>c</think>", ("a", "b<think>c</think>")),
        (" Yes <think>no</think>", ("", " Yes <think>no</think>")),
        ("<thinking>", ("", "<thinking>")),
        (" <thi", ("", " <thi")),
        ("  ", ("", "  ")),
        ("", ("", "")),
    ],
)
def test_thoughts_are_split_from_the_answer(answer, expected):
    assert parse(parser_of(), answer) == expected
    assert parse(parser_of(), *answer) == expected


def test_a_prompt_may_have_opened_the_thoughts():
    assert parse(parser_of(is_inside=True), "Hm.\n</think>\n\nYes") == ("Hm.", "Yes")
    assert parse(parser_of(is_inside=True), "Hm.") == ("Hm.", "")


def test_thoughts_are_given_as_they_come():
    parser = parser_of()
    assert parser.push("<think>\nHm") == [ReasoningText("Hm")]
    assert parser.push(". So") == [ReasoningText(". So")]
    assert parser.push(".\n</think>\n\nY") == [ReasoningText("."), ReplyText("Y")]


FRAGMENTS = st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n", "Hm", "Yes"])


@given(st.booleans(), st.lists(FRAGMENTS, max_size=10), st.data())
def test_any_cut_gives_the_same(is_inside, fragments, data):
    answer = "".join(fragments)
    cut = data.draw(st.integers(0, len(answer)))
    whole = parse(partial(parser_of, is_inside=is_inside)(), answer)
    assert parse(parser_of(is_inside=is_inside), answer[:cut], answer[cut:]) == whole
    assert parse(parser_of(is_inside=is_inside), *answer) == whole


def test_whether_thoughts_are_wanted():
    assert thinks(None, {}) is thinks("high", {"thinking": None}) is None
    assert thinks("none", {}) is thinks(None, {"enable_thinking": False}) is False
    assert thinks("none", {"thinking": True}) is True
    for options, param in (
        ({"tokenize": True}, "chat_template_kwargs"),
        ({"thinking": 1}, "chat_template_kwargs.thinking"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            thinks(None, options)
        assert caught.value.param == param


def test_the_marks_are_looked_for_in_the_template():
    assert reasoning_format("auto", "... '</think>' in content ...") == "think"
    assert reasoning_format("auto", "plain") == "none"
    assert reasoning_format("none", "</think>") == "none"
    assert reasoning_format("think", "plain") == "think"
