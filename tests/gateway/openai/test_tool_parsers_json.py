import json

import pytest

from gateway.openai.tool_parsers import AnswerParser, CallArguments, CallStart, ReplyText
from gateway.openai.tool_parsers_json import NotACall, read_call, read_call_list, read_value


def parse(read, text, **options):
    """Parts of a text; what is no call is a reply "no"."""

    def reader(source, sink):
        try:
            yield from read(source, sink, **options)
        except NotACall:
            sink.reply("no")

    parser = AnswerParser(reader)
    return parser.push(text) + parser.finish()


def calls_of(parts):
    calls = {}
    for part in parts:
        match part:
            case CallStart(index=index, name=name):
                assert index == len(calls)
                calls[index] = [name, ""]
            case CallArguments(index=index, text=text):
                calls[index][1] += text
    return [tuple(call) for call in calls.values()]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "f", "arguments": {"a": 1}}', '{"a": 1}'),
        ('{"name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{ "id" : [1, "]"], "name" : "f" , "arguments" : { } }', "{ }"),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": \\"\\\\n\\"}"}', '{"a": "\\n"}'),
        ('{"name": "f", "arguments": "word"}', '"word"'),
        ('{"name": "f", "arguments": 7}', "7"),
        ('{"name": "f", "arguments": [1, [2]]}', "[1, [2]]"),
        ('{"name": "f", "arguments": {"a": "}\\"{\\\\"}}', '{"a": "}\\"{\\\\"}'),
        ('{"name": "f", "arguments": {"a": 1}, "arguments": {"b": 2}}', '{"a": 1}'),
        ('{"name": "\\u0066", "arguments": {}}', "{}"),
        # Broken off, or broken: what there is of it.
        ('{"name": "f", "arguments": {"a": "x', '{"a": "x'),
        ('{"name": "f", "arguments": "{\\"a\\": 1', '{"a": 1'),
        ('{"name": "f", "arguments": {"a": 1} oh', '{"a": 1}'),
        ('{"name": "f", oh', ""),
    ],
)
def test_a_call_is_read_however_it_is_spelled(text, arguments):
    assert calls_of(parse(read_call, text)) == [("f", arguments)]


@pytest.mark.parametrize(
    "text",
    ["x", "{}", "[]", '{"name": 5}', '{"name": ""}', '{"arguments": {}}', "{name: 1}", '{"a" 1}'],
)
def test_what_is_no_call_gives_none(text):
    assert parse(read_call, text) == [ReplyText("no")]


def test_a_name_that_is_not_accepted_is_no_call():
    text = '{"name": "f", "arguments": {}}'
    assert parse(read_call, text, accepts={"g"}.__contains__) == [ReplyText("no")]


def test_arguments_grow_with_the_text():
    parser = AnswerParser(read_call)
    assert parser.push('{"name": "f", "arguments": {"ci') == [
        CallStart(0, "f"),
        CallArguments(0, '{"ci'),
    ]
    assert parser.push('ty": "Par') == [CallArguments(0, 'ty": "Par')]
    assert parser.push('is"}}') == [CallArguments(0, 'is"}')]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('[{"name": "f"}]', ["f"]),
        ('[ {"name": "f"} , {"name": "g"} ]', ["f", "g"]),
        ('[{"name": "f"}, 5]', ["f"]),
        ('[{"name": "f"} {"name": "g"}]', ["f"]),
    ],
)
def test_a_list_of_calls(text, names):
    assert [name for name, _ in calls_of(parse(read_call_list, text))] == names


@pytest.mark.parametrize("text", ["[]", "{}", "[5]", '[{"a": 1}]'])
def test_a_list_without_calls_is_none(text):
    assert parse(read_call_list, text) == [ReplyText("no")]


@pytest.mark.parametrize("value", [1, -1.5e3, True, None, "a\"]}'", [], {}, [{"a": ["}"]}], "\\"])
def test_a_value_ends_where_it_ends(value):
    def reader(source, sink):
        yield from read_value(source, sink.reply)
        sink.reply("|")

    parser = AnswerParser(reader)
    [reply] = parser.push(json.dumps(value) + " ,")
    assert reply.text == json.dumps(value) + "|"


@pytest.mark.parametrize("text", [r'{"name": "\ud800"}', r'{"name": "f\udfff", "arguments": {}}'])
def test_a_name_with_half_a_character_is_no_call(text):
    assert parse(read_call, text) == [ReplyText("no")]


def test_whole_characters_are_read_from_their_halves():
    text = r'{"name": "\ud83d\ude00", "arguments": "{\"a\": \"\ud83d\ude00\"}"}'
    assert calls_of(parse(read_call, text)) == [("😀", '{"a": "😀"}')]


def test_arguments_with_half_a_character_are_passed_on_as_written():
    written = r'"{\"a\": \"\ud800\"}"'
    text = f'{{"name": "f", "arguments": {written}}}'
    assert calls_of(parse(read_call, text)) == [("f", written)]
