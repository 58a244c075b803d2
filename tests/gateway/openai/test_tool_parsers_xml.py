import json
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai.tool_parsers import AnswerParser, CallArguments, CallStart, ReplyText
from gateway.openai.tool_parsers_formats import read_answer

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "where": {"type": "object"},
        "maybe": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "either": {"type": ["string", "integer"]},
        "any": {},
    },
}


def parser_of(style, schema=SCHEMA):
    return AnswerParser(partial(read_answer, style=style, tools={"f": schema}))


def parse(parser, *pieces):
    """Text and calls of an answer."""
    text, calls = "", []
    for part in [p for piece in pieces for p in parser.push(piece)] + parser.finish():
        match part:
            case ReplyText(text=more):
                text += more
            case CallStart(name=name):
                calls.append([name, ""])
            case CallArguments(text=more):
                calls[-1][1] += more
    return text, [tuple(call) for call in calls]


def qwen(name, **values):
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def glm(name, **values):
    arguments = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items()
    )
    return f"<tool_call>{name}\n{arguments}</tool_call>"


both = pytest.mark.parametrize(("style", "write"), [("qwen3_xml", qwen), ("glm45", glm)])


@both
@pytest.mark.parametrize(
    ("values", "arguments"),
    [
        ({}, {}),
        ({"city": "Paris"}, {"city": "Paris"}),
        ({"city": "7"}, {"city": "7"}),
        ({"city": ""}, {"city": ""}),
        ({"city": 'a "quoted" \\ <b>\n\tline</b>'}, {"city": 'a "quoted" \\ <b>\n\tline</b>'}),
        ({"days": "3"}, {"days": 3}),
        ({"days": "three"}, {"days": "three"}),
        ({"days": "True", "maybe": "None"}, {"days": True, "maybe": None}),
        ({"maybe": "1.5"}, {"maybe": 1.5}),
        ({"maybe": "NaN"}, {"maybe": "NaN"}),
        ({"where": '{"x": [1, 2]}'}, {"where": {"x": [1, 2]}}),
        ({"where": "[" * 100_000}, {"where": "[" * 100_000}),
        ({"either": "3", "any": "4", "other": "5"}, {"either": "3", "any": "4", "other": "5"}),
    ],
)
def test_a_value_is_what_the_schema_says(style, write, values, arguments):
    text, [(name, written)] = parse(parser_of(style), "I ask. " + write("f", **values))
    assert (text, name) == ("I ask.", "f")
    assert json.loads(written) == arguments
    assert list(json.loads(written)) == list(arguments)


@both
def test_calls_follow_each_other(style, write):
    answer = write("f", city="a") + "\n" + write("g", days="1") + " Done."
    text, calls = parse(parser_of(style), answer)
    assert calls == [("f", '{"city": "a"}'), ("g", '{"days": "1"}')]  # g is no tool: text
    assert text == " Done."
    assert parse(parser_of(style), *answer) == (text, calls)  # one character at a time


@both
def test_text_arrives_while_it_is_written(style, write):
    parser = parser_of(style)
    begin = write("f", city="Par").partition("Par")[0]
    parser.push(begin)
    assert parser.push('Pa"r') == [CallArguments(0, 'Pa\\"r')]
    assert parser.push("is") == [CallArguments(0, "is")]


@both
def test_a_call_that_is_cut_has_what_there_is(style, write):
    begin, _, _ = write("f", days="3", city="Paris").partition("ris")
    assert parse(parser_of(style), begin) == ("", [("f", '{"days": 3, "city": "Pa')])


@both
@pytest.mark.parametrize(
    "answer",
    [
        "a <tool_call> b",
        "<tool_call>",
        "<tool_call>\n<function",
        "<tool_call>\n<function=a b>\n</function>",
        f"<tool_call>{'x' * 70}\n",
        f"<tool_call>{'x' * 500}",
        "<tool_call>[1]</tool_call>",
        "<function=f>",
    ],
)
def test_what_is_no_call_stays_text(style, write, answer):
    text, calls = parse(parser_of(style), answer)
    assert (text, calls) == (answer, [])


def test_qwen_may_write_json_or_leave_out_an_end():
    json_call = '<tool_call>{"name": "f", "arguments": {"city": "a"}}</tool_call>'
    open_call = "<tool_call>\n<function=f>\n<parameter=days>1</parameter>\n</tool_call>"
    answer = f"{json_call}{open_call} Bye."
    calls = [("f", '{"city": "a"}'), ("f", '{"days": 1}')]
    assert parse(parser_of("qwen3_xml"), answer) == (" Bye.", calls)


@pytest.mark.parametrize(
    ("style", "answer"),
    [
        (
            "qwen3_xml",
            "<tool_call><function=f><parameter=city>a</parameter><parameter=city>b</parameter>"
            "</function></tool_call>",
        ),
        (
            "glm45",
            "<tool_call>f<arg_key>city</arg_key><arg_value>a</arg_value>"
            "<arg_key>city</arg_key><arg_value>b</arg_value></tool_call>",
        ),
    ],
)
def test_of_a_value_that_comes_twice_the_first_counts(style, answer):
    assert parse(parser_of(style), answer) == ("", [("f", '{"city": "a"}')])


KEYS = st.text("abc_", min_size=1, max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@both
@given(texts=st.dictionaries(KEYS, st.text(max_size=12), max_size=3), data=st.data())
def test_whatever_the_arguments_they_come_out_as_they_went_in(style, write, texts, data):
    others = data.draw(st.dictionaries(KEYS, VALUES, max_size=3))
    arguments = {**others, **texts}
    schema = {
        "properties": {key: {"type": "string" if key in texts else "object"} for key in arguments}
    }
    written = {
        key: value if key in texts else json.dumps(value) for key, value in arguments.items()
    }
    answer = write("f", **written)
    cut = data.draw(st.integers(0, len(answer)))
    _, calls = parse(parser_of(style, schema), answer[:cut], answer[cut:])
    assert [(name, json.loads(text)) for name, text in calls] == [("f", arguments)]
