"""The types say what handlers really answer."""

import msgspec
import pytest

from fakes import FakeEngine
from gateway.openapi_bodies import ErrorBody
from gateway.openapi_routes import OPERATIONS

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": ["hi", "ho"], "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104, 105]},
    "/v1/ws-ticket": {},
}
JSON_OPERATIONS = {
    o.path: o
    for o in OPERATIONS
    if any(c.media_type == "application/json" for c in o.answers.get(200, ("", ()))[1])
    and (o.method == "get" or o.path in BODIES)
}


def type_of(operation, status, media_type="application/json"):
    return next(c.type for c in operation.answers[status][1] if c.media_type == media_type)


@pytest.mark.parametrize("path", JSON_OPERATIONS)
async def test_an_answer_is_of_the_type_that_the_document_gives(gateway, path):
    operation = JSON_OPERATIONS[path]
    if operation.method == "get":
        _, response = await gateway.post("/v1/responses", BODIES["/v1/responses"])
        names = {"name": "tiny", "response_id": response["id"]}
        status, body = await gateway.get(path.format(**names))
    else:
        status, body = await gateway.post(path, BODIES[path])
    assert status == 200
    msgspec.convert(body, type_of(operation, 200))
    if struct_fields := getattr(type_of(operation, 200), "__struct_fields__", None):
        assert set(body) <= set(struct_fields), "the answer has fields that the type does not name"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_so_is_each_event_of_a_stream(gateway, path):
    type_ = type_of(JSON_OPERATIONS[path], 200, "text/event-stream")
    async with gateway.session.post(path, json={**BODIES[path], "stream": True}) as response:
        assert response.content_type == "text/event-stream"
        lines = [line[6:] async for line in response.content if line.startswith(b"data: ")]
    assert lines.pop() == b"[DONE]\n"
    for line in lines:
        msgspec.json.decode(line, type=type_)


async def test_so_is_each_event_of_a_response(gateway):
    body = {**BODIES["/v1/responses"], "stream": True}
    type_ = type_of(JSON_OPERATIONS["/v1/responses"], 200, "text/event-stream")
    async with gateway.session.post("/v1/responses", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: "):
                msgspec.json.decode(line[6:], type=type_)


async def test_an_error_is_an_error_body(gateway):
    _, body = await gateway.post("/v1/completions", {})
    assert msgspec.convert(body, ErrorBody).error["param"] == "prompt"


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_a_dead_engine_says_so_in_the_form_that_is_described(start_gateway, path):
    engine = FakeEngine()
    gateway = await start_gateway(engine)
    engine.die("out of memory")
    status, body = await gateway.get(path)
    assert status == 503
    msgspec.convert(body, type_of(JSON_OPERATIONS[path], 503))
