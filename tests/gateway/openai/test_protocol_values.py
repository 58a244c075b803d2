"""Every field of every body with values that it cannot have: a 4xx that names it, or an answer."""

import json

import pytest

from gateway.openapi import document

SCHEMAS = document("0")["components"]["schemas"]
USER = {"role": "user", "content": "Hi"}

# Address -> its type of body, and one that is right.
BODIES = {
    "/v1/chat/completions": ("ChatBody", {"messages": [USER], "max_tokens": 2}),
    "/v1/completions": ("CompletionBody", {"prompt": "Hi", "max_tokens": 2}),
    "/v1/responses": ("ResponsesBody", {"input": "Hi", "max_output_tokens": 2}),
    "/v1/stream/events": ("StartRequest", {"prompt": "Hi", "max_tokens": 2}),
    "/tokenize": ("TokenizeBody", {"prompt": "Hi"}),
    "/detokenize": ("DetokenizeBody", {"tokens": [70]}),
}
# Beside those that we know: fields of others, of which some ask for what we do not do.
STRANGERS = ("best_of", "suffix", "functions", "function_call", "user", "conversation", "x")

VALUES = [
    *(None, True, -1, 2, 10**30, 1.5, 1e308, "", "x", "y" * 2000, "\x00"),
    *([], {}, [None], [[]], [{}], [-1], [2**70], ["a"] * 300, {"a": None}, {"type": "x"}),
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "y"}}}],
    [{"role": "user"}],
]


def deep(number: int) -> object:
    value: object = []
    for _ in range(number):
        value = [value]
    return value


def has_to_do_with(param: str | None, field: str) -> bool:
    """Whether this is the name of the field, or of something in it."""
    return param is not None and (param == field or param.startswith((f"{field}.", f"{field}[")))


@pytest.mark.parametrize("path", BODIES)
async def test_no_value_of_any_field_is_a_fault_of_ours(start_gateway, path):
    gateway = await start_gateway(body_read_timeout_s=60)
    name, right = BODIES[path]
    fields = [*SCHEMAS[name]["properties"], *STRANGERS]
    # Some errors are about two fields, and name the other one.
    excused = {
        *(("/v1/responses", "response_format"), ("/v1/responses", "instructions")),
        *(("/tokenize", "messages"), ("/v1/stream/events", "messages")),
    }
    for field in fields:
        for value in [*VALUES, deep(200)]:
            body = {**right, field: value}
            if path == "/v1/stream/events":
                body = {"request": body}
            async with gateway.session.post(
                path, data=json.dumps(body), headers={"Content-Type": "application/json"}
            ) as response:
                text = await response.text()
            shown = f"{field}={str(value)[:60]}: {text[:200]}"
            assert response.status < 500, shown
            if response.status >= 400:
                error = json.loads(text)["error"]
                assert set(error) == {"message", "type", "param", "code"}, shown
                assert "Traceback" not in text, shown
                if (path, field) not in excused:
                    assert has_to_do_with(error["param"], field), shown
            elif value is None and field not in right:
                assert response.status == 200, shown
    await gateway.engine.wait_until_idle()
