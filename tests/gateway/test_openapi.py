import msgspec
import pytest

from gateway.openapi import document
from gateway.openapi_routes import OPERATIONS


@pytest.fixture(scope="module")
def described():
    return document("1.2.3")


def references(value):
    """Every $ref anywhere in a value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def responses(described):
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield f"{method} {path}", operation["responses"]


async def test_it_is_served(gateway):
    status, body = await gateway.get("/openapi.json")
    assert (status, body["openapi"], body["info"]["title"]) == (200, "3.1.0", "headrace")
    assert body["paths"]["/v1/chat/completions"]["post"]["requestBody"]["required"] is True


def test_every_reference_leads_somewhere(described):
    found = set(references(described))
    assert "#/components/schemas/ChatBody" in found
    for reference in found:
        target = described
        for key in reference.removeprefix("#/").split("/"):
            target = target[key]


def test_operation_ids_are_unique(described):
    ids = [o["operationId"] for methods in described["paths"].values() for o in methods.values()]
    assert len(set(ids)) == len(ids) == len(OPERATIONS)
    assert "post_v1_chat_completions" in ids


def test_every_operation_has_an_answer_that_is_no_error_and_the_errors_of_its_kind(described):
    bodies = {f"{o.method} {o.path}" for o in OPERATIONS if o.body is not None}
    for name, answers in responses(described):
        assert answers.keys() & {"101", "200", "204"}, name
        assert {"403", "500"} <= answers.keys(), name
        assert (name in bodies) == ({"400", "413", "415", "429", "503"} <= answers.keys()), name


def test_fields_are_those_of_the_request_types(described):
    chat = described["components"]["schemas"]["ChatBody"]
    assert chat["required"] == ["messages"]
    assert {"type": "null"} in chat["properties"]["temperature"]["anyOf"]
    assert set(chat["properties"]) >= {"messages", "stream", "max_completion_tokens", "seed"}


def test_parameters_have_their_bounds(described):
    by_name = {p["name"]: p for p in described["paths"]["/v1/steps"]["get"]["parameters"]}
    assert by_name["limit"]["schema"] == {"type": "integer", "minimum": 1, "maximum": 1000}
    assert by_name["shares"]["schema"] == {"enum": ["0", "1"]}
    assert by_name["after"]["required"] is False


def test_a_stream_says_what_its_events_are(described):
    content = described["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert content["text/event-stream"]["schema"]["type"] == "string"
    assert "TextCompletion" in content["text/event-stream"]["schema"]["description"]


def test_it_can_be_written_as_json(described):
    assert msgspec.json.decode(msgspec.json.encode(described)) == described
