import json

import msgspec
import pytest

from gateway.errors import InvalidRequest
from gateway.openai.protocol import CompletionBody
from gateway.openai.structure import structures_of_body

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}

TAG = {"begin": "<f=add>", "schema": SCHEMA, "end": "</f>"}
TAGS = {"type": "structural_tag", "structures": [TAG], "triggers": ["<f=", "<f"]}


def structure(**fields):
    body = msgspec.convert({"prompt": "x", **fields}, CompletionBody)
    return body.wishes(structures=structures_of_body(body)).structure


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"guided_json": None, "guided_regex": None},
    ],
)
def test_most_requests_want_any_text(fields):
    assert structure(**fields) is None


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"response_format": FORMAT}, "json_schema", "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", "structured_outputs.json"),
        ({"guided_json": SCHEMA}, "json_schema", "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", "guided_json"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "structured_outputs.regex"),
        ({"guided_regex": "a+"}, "regex", "guided_regex"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", "structured_outputs.choice"),
        ({"guided_choice": ["a", "b"]}, "choice", "guided_choice"),
        ({"structured_outputs": {"grammar": "g"}}, "grammar", "structured_outputs.grammar"),
        ({"guided_grammar": "g"}, "grammar", "guided_grammar"),
    ],
)
def test_every_way_to_ask_is_understood(fields, kind, param):
    found = structure(**fields)
    assert (found.kind, found.param) == (kind, param)
    if kind in ("json_schema", "choice"):
        assert json.loads(found.text) == (SCHEMA if kind == "json_schema" else ["a", "b"])


@pytest.mark.parametrize(
    "fields",
    [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}],
)
def test_any_object_is_a_schema_too(fields):
    assert json.loads(structure(**fields).text) == {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": TAGS}, "response_format"),
        ({"structured_outputs": {"structural_tag": TAGS}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"structural_tag": json.dumps(TAGS)}},
            "structured_outputs.structural_tag",
        ),
    ],
)
def test_tags_in_running_text_have_the_trigger_that_comes_first(fields, param):
    found = structure(**fields)
    assert (found.kind, found.param) == ("structural_tag", param)
    assert json.loads(found.text) == [{"trigger": "<f", **TAG}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "5"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {**TAGS, "structures": []}}, "response_format"),
        ({"response_format": {**TAGS, "structures": [TAG] * 129}}, "response_format"),
        ({"response_format": {**TAGS, "triggers": ["<f", ""]}}, "response_format"),
        (
            {"response_format": {**TAGS, "structures": [TAG, {**TAG, "begin": "f"}]}},
            "response_format.structures[1].begin",
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            "response_format.format",
        ),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        (
            {"response_format": FORMAT, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
    ],
)
def test_what_is_no_structure_is_refused_by_name(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        structure(**fields)
    assert caught.value.param == param


async def test_a_schema_that_cannot_be_compiled_is_status_400(gateway):
    body = {"prompt": "x", "max_tokens": 2}
    for fields, param in (
        ({"guided_json": {"type": "wizard"}}, "guided_json"),
        ({"guided_regex": "(a"}, "guided_regex"),
    ):
        status, answer = await gateway.post("/v1/completions", {**body, **fields})
        assert (status, answer["error"]["param"]) == (400, param)
    assert gateway.engine.submitted == []


async def test_a_grammar_reaches_the_engine_once_for_all_choices(gateway):
    body = {"prompt": "x", "max_tokens": 2, "n": 2, "guided_regex": "a+"}
    status, _ = await gateway.post("/v1/completions", body)
    assert status == 200
    first, second = (params.grammar for _, params in gateway.engine.submitted)
    assert first is second
    assert first is not None
