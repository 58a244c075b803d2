import json

import pytest

from fakes import EOS, byte_tokenizer
from gateway.errors import InvalidRequest
from gateway.grammars import GrammarCompiler
from gateway.openai.protocol import FunctionBody
from gateway.openai.tools_forced import arguments_structure, calls_structure

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Paris", "Oslo"]}},
}
ZONE = {
    "type": "object",
    "properties": {"zone": {"$ref": "#/definitions/City"}},
    "required": ["zone"],
    "additionalProperties": False,
    "definitions": {"City": {"enum": ["UTC"]}},
}
WEATHER = FunctionBody(name="weather", parameters=CITY)
CLOCK = FunctionBody(name="clock", parameters=ZONE)
ANY = FunctionBody(name="any")


@pytest.fixture
async def accepts():
    compiler = GrammarCompiler(byte_tokenizer(), eos_token_ids=(EOS,))

    async def check(structure, text):
        """Whether the text matches the structure from its first to its last byte."""
        matcher = (await compiler.compile(structure)).new_matcher()
        for byte in text.encode():
            mask = matcher.mask()
            if not mask[byte // 8] >> byte % 8 & 1:
                return False
            matcher.accept(byte)
        return True

    yield check
    compiler.close()


async def test_arguments_are_those_of_the_tool(accepts):
    structure = arguments_structure(WEATHER, index=0)
    assert await accepts(structure, '{"city": "Paris"}')
    assert not await accepts(structure, '{"city": "Rome"}')
    assert not await accepts(structure, "Paris")


async def test_a_tool_without_parameters_takes_any_object(accepts):
    for function in (ANY, FunctionBody(name="f", parameters={"title": "F"})):
        structure = arguments_structure(function, index=0)
        assert await accepts(structure, '{"a": [1]}')
        assert not await accepts(structure, "[1]")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([{"name": "weather", "arguments": {"city": "Oslo"}}], True),
        ([{"name": "clock", "arguments": {"zone": "UTC"}}], True),
        (
            [
                {"name": "weather", "arguments": {"city": "Oslo"}},
                {"name": "any", "arguments": {"x": 1}},
            ],
            True,
        ),
        ([{"name": "weather", "arguments": {"zone": "UTC"}}], False),
        ([{"name": "clock", "arguments": {"zone": "Oslo"}}], False),
        ([{"name": "other", "arguments": {}}], False),
        ([{"arguments": {}, "name": "any"}], False),
        ([], False),
        ({}, False),
    ],
)
async def test_forced_calls_are_of_the_tools(accepts, answer, expected):
    structure = calls_structure([WEATHER, CLOCK, ANY], max_calls=None)
    assert await accepts(structure, json.dumps(answer)) == expected


async def test_there_are_no_more_calls_than_allowed(accepts):
    calls = [{"name": "any", "arguments": {}}]
    structure = calls_structure([ANY], max_calls=1)
    assert await accepts(structure, json.dumps(calls))
    assert not await accepts(structure, json.dumps(calls * 2))


async def test_a_schema_that_is_none_is_refused_by_its_place(accepts):
    broken = FunctionBody(name="f", parameters={"type": "nonsense"})
    with pytest.raises(InvalidRequest) as caught:
        await accepts(arguments_structure(broken, index=3), "{}")
    assert caught.value.param == "tools[3].function.parameters"
    with pytest.raises(InvalidRequest) as caught:
        await accepts(calls_structure([broken], max_calls=None), "{}")
    assert caught.value.param == "tools"


def test_a_schema_that_cannot_be_written_is_refused_by_its_name():
    huge = FunctionBody(name="huge", parameters={"properties": {"n": {"const": 2**64}}})
    for make in (
        lambda: arguments_structure(huge, index=1),
        lambda: calls_structure([ANY, huge], max_calls=None),
    ):
        with pytest.raises(InvalidRequest) as caught:
            make()
        assert caught.value.param == "tools[1].function.parameters"
