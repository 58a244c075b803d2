import json
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai.tool_parsers import (
    MAX_REWOUND,
    AnswerParser,
    CallArguments,
    CallStart,
    CharSource,
    ReplyText,
)
from gateway.openai.tool_parsers_formats import (
    read_answer,
    read_forced_call,
    read_forced_calls,
    tool_format,
)

NAMES = ("f", "g")
STYLES = ["hermes", "llama3_json", "mistral", "qwen3_xml", "glm45"]
WEATHER = '{"city": "Paris", "days": [1, 2]}'


def parser_of(style, **options):
    return AnswerParser(
        partial(read_answer, style=style, tools={name: {} for name in NAMES}), **options
    )


def parse(parser, *pieces):
    """Text and calls of an answer."""
    text, calls = "", []
    for part in [p for piece in pieces for p in parser.push(piece)] + parser.finish():
        match part:
            case ReplyText(text=more):
                text += more
            case CallStart(index=index, name=name):
                assert index == len(calls)
                calls.append([name, ""])
            case CallArguments(index=index, text=more):
                assert index == len(calls) - 1
                calls[index][1] += more
    return text, [tuple(call) for call in calls]


@pytest.mark.parametrize(
    ("style", "answer", "text", "calls"),
    [
        (
            "hermes",
            f'<tool_call>\n{{"name": "f", "arguments": {WEATHER}}}\n</tool_call>',
            "",
            [("f", WEATHER)],
        ),
        (
            "hermes",
            f'I ask.\n<tool_call>\n{{"name": "f", "arguments": {WEATHER}}}\n</tool_call>\n'
            '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>\n',
            "I ask.",
            [("f", WEATHER), ("other", "{}")],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g"}</tool_call> Done.',
            " Done.",
            [("f", "{}"), ("g", "{}")],
        ),
        ("hermes", "a <tool_call>[1]</tool_call> b ", "a <tool_call>[1]</tool_call> b ", []),
        ("hermes", 'x <tool_call>{"na', 'x <tool_call>{"na', []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a', "", [("f", '{"a')]),
        ("hermes", f'{{"name": "f", "arguments": {WEATHER}}}', None, []),
        (
            "llama3_json",
            f'{{"name": "f", "parameters": {WEATHER}}}',
            "",
            [("f", WEATHER)],
        ),
        (
            "llama3_json",
            '\n{"type": "function", "name": "f", "parameters": {}}; '
            '{"name": "g", "parameters": {"a": ";"}}',
            "",
            [("f", "{}"), ("g", '{"a": ";"}')],
        ),
        (
            "llama3_json",
            f'Well, <|python_tag|>{{"name": "other", "parameters": {WEATHER}}}',
            "Well,",
            [("other", WEATHER)],
        ),
        ("llama3_json", ' {"name": "other", "parameters": {}} ', None, []),
        ("llama3_json", '{"a": {"name": "f"}}', None, []),
        ("llama3_json", "<|python_tag|>print(1)", None, []),
        ("llama3_json", 'Say {"name": "f", "parameters": {}}', None, []),
        ("llama3_json", '{"name": "f"}; {"name": "other"}', '{"name": "other"}', [("f", "{}")]),
        (
            "mistral",
            f'[TOOL_CALLS] [{{"name": "f", "arguments": {WEATHER}}}, {{"name": "g"}}]',
            "",
            [("f", WEATHER), ("g", "{}")],
        ),
        (
            "mistral",
            f"Hm. [TOOL_CALLS]f[ARGS]{WEATHER}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{{}}",
            "Hm.",
            [("f", WEATHER), ("g", "{}")],
        ),
        ("mistral", f"[TOOL_CALLS]f{WEATHER}", "", [("f", WEATHER)]),
        ("mistral", '[TOOL_CALLS]{"name": "f"}', "", [("f", "{}")]),
        ("mistral", "[TOOL_CALLS] what is this {", None, []),
        ("mistral", f"[TOOL_CALLS]{'x' * 300}", None, []),
    ],
)
def test_calls_are_told_from_text(style, answer, text, calls):
    text = answer if text is None else text
    assert parse(parser_of(style), answer) == (text, calls)
    assert parse(parser_of(style), *answer) == (text, calls)  # one character at a time


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<function=f>",
        "<parameter=a>",
        "</parameter>",
        "</function>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        '{"name": "f", "arguments": {"a": [1, "}"]}}',
        '{"arguments": "{}", "name": "g"}',
        '{"name": "other", "parameters": {}}',
        '{"name": "f", "arguments": ',
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        ",",
        ";",
        "f",
        " ",
        "\n",
        "<",
        "text",
    ]
)


@given(
    style=st.sampled_from(STYLES),
    fragments=st.lists(FRAGMENTS, max_size=10),
    data=st.data(),
)
def test_any_cut_of_any_answer_gives_the_same_calls(style, fragments, data):
    answer = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=6)))
    ends = [*cuts, len(answer)]
    pieces = [answer[start:end] for start, end in zip([0, *cuts], ends, strict=True)]
    assert parse(parser_of(style), *pieces) == parse(parser_of(style), answer)


@given(style=st.sampled_from(STYLES), answer=st.text())
def test_an_answer_without_calls_is_the_text_itself(style, answer):
    text, calls = parse(parser_of(style), answer)
    assert (text, calls) == (answer, [])


JSON_OBJECTS = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=6),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=6,
    ),
    max_size=3,
)


@given(st.lists(st.tuples(st.sampled_from(NAMES), JSON_OBJECTS), min_size=1, max_size=3))
def test_whatever_the_arguments_they_are_passed_on_as_written(calls):
    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    expected = [(name, json.dumps(arguments)) for name, arguments in calls]
    written = [json.dumps(call) for call in objects]
    for style, answer in (
        ("hermes", "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)),
        ("llama3_json", "; ".join(written)),
        ("mistral", f"[TOOL_CALLS] {json.dumps(objects)}"),
        ("mistral", "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls)),
    ):
        assert parse(parser_of(style), *answer) == ("", expected)


def test_a_call_is_known_before_its_arguments_end():
    parser = parser_of("hermes")
    assert parser.push('<tool_call>\n{"name": "f", "arg') == [CallStart(0, "f")]
    assert parser.push('uments": {"city": "Pa') == [CallArguments(0, '{"city": "Pa')]


def test_an_object_that_is_no_call_is_not_held_back():
    parser = parser_of("llama3_json")
    assert parser.push('{"answer"') == [ReplyText('{"answer"')]
    assert parser.push(": [1") == [ReplyText(": [1")]


def test_only_the_first_call_counts_if_one_is_asked_for():
    answer = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>'
    assert parse(parser_of("hermes", max_calls=1), answer) == ("", [("f", "{}")])


def test_a_forced_call_is_all_arguments():
    parser = AnswerParser(partial(read_forced_call, name="f"))
    assert parser.push(" ") == [CallStart(0, "f")]
    assert parser.push('{"a": ') == [CallArguments(0, '{"a": ')]
    assert parse(AnswerParser(partial(read_forced_call, name="f")), WEATHER, " ") == (
        "",
        [("f", WEATHER)],
    )


def test_forced_calls_are_a_list():
    answer = ' [{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    parser = AnswerParser(read_forced_calls)
    assert parse(parser, *answer) == ("", [("f", '{"a": 1}'), ("g", "{}")])
    assert parse(AnswerParser(read_forced_calls), "no list ") == ("no list ", [])


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("... <tool_call> ...", "hermes"),
        ("... <|python_tag|> ...", "llama3_json"),
        ("... [TOOL_CALLS] ...", "mistral"),
        ("<tool_call>\n<function=name>", "qwen3_xml"),
        ("<tool_call>{name}\n<arg_key>", "glm45"),
        ("plain", None),
    ],
)
def test_the_format_is_read_off_the_template(template, found):
    assert tool_format("auto", template) == found
    assert tool_format("mistral", template) == "mistral"


@pytest.mark.parametrize(
    ("style", "mark"),
    [("hermes", "<tool_call>"), ("llama3_json", "<|python_tag|>"), ("mistral", "[TOOL_CALLS]")],
)
@pytest.mark.parametrize("inside", ['{"a":[', "[{", '{"name":["'])
def test_marks_in_marks_are_not_read_again_from_each(monkeypatch, style, mark, inside):
    num_taken = 0
    take = CharSource.take

    def counted(self):
        nonlocal num_taken
        num_taken += 1
        return take(self)

    monkeypatch.setattr(CharSource, "take", counted)
    k = 2000
    answer = f"{mark}{inside}" * k + "]}" * k
    assert parse(parser_of(style), answer) == (answer, [])
    assert num_taken <= len(answer) + MAX_REWOUND + 1


def test_a_call_is_found_after_many_marks_that_mean_nothing():
    noise = "<tool_call> no </tool_call> " * 1000
    answer = f'{noise}<tool_call>{{"name": "f", "arguments": {WEATHER}}}</tool_call>'
    assert parse(parser_of("hermes"), answer) == (noise.rstrip(), [("f", WEATHER)])
