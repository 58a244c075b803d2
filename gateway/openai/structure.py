"""Structured output as clients ask for it: OpenAI's `response_format`, and vLLM's fields."""

import orjson

from gateway.errors import InvalidRequest
from gateway.grammars import Structure
from gateway.openai.protocol import ResponseFormat, SamplingBody, StructuredOutputs

__all__ = ["structure_of"]

ANY_OBJECT = '{"type":"object"}'
MAX_CHOICES = 1024


def structure_of(body: SamplingBody) -> Structure | None:
    """Return what the answer must match; None for any text.

    Raises:
        InvalidRequest: more than one structure, or one that is none.
    """
    found = [
        *_of_response_format(body.response_format),
        *_of_structured_outputs(body.structured_outputs),
        *_of_fields(
            "guided_",
            json=body.guided_json,
            regex=body.guided_regex,
            choice=body.guided_choice,
            grammar=body.guided_grammar,
        ),
    ]
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise InvalidRequest(f"{first} and {second} exclude each other", param=second)
    return found[0] if found else None


def _of_response_format(wanted: ResponseFormat | None) -> list[Structure]:
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [Structure(kind="json_schema", text=ANY_OBJECT, param="response_format")]
    if wanted.type != "json_schema":
        raise InvalidRequest(
            f"response_format.type must be text, json_object or json_schema, "
            f"got '{wanted.type[:40]}'",
            param="response_format.type",
        )
    param = "response_format.json_schema"
    if wanted.json_schema is None:
        raise InvalidRequest(f"{param} is required", param=param)
    if wanted.json_schema.schema is None:
        raise InvalidRequest(f"{param}.schema is required", param=f"{param}.schema")
    return [_json(wanted.json_schema.schema, f"{param}.schema")]


def _of_structured_outputs(wanted: StructuredOutputs | None) -> list[Structure]:
    if wanted is None:
        return []
    if wanted.structural_tag is not None:
        param = "structured_outputs.structural_tag"
        raise InvalidRequest(f"{param} is not supported", param=param, code="unsupported_parameter")
    found = _of_fields(
        "structured_outputs.",
        json=wanted.json,
        regex=wanted.regex,
        choice=wanted.choice,
        grammar=wanted.grammar,
    )
    if wanted.json_object:
        param = "structured_outputs.json_object"
        found.append(Structure(kind="json_schema", text=ANY_OBJECT, param=param))
    return found


def _of_fields(
    prefix: str,
    *,
    json: str | dict[str, object] | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> list[Structure]:
    found = []
    if json is not None:
        found.append(_json(json, f"{prefix}json"))
    if regex is not None:
        found.append(Structure(kind="regex", text=regex, param=f"{prefix}regex"))
    if choice is not None:
        param = f"{prefix}choice"
        if not 0 < len(choice) <= MAX_CHOICES or not all(choice):
            raise InvalidRequest(
                f"{param} must hold 1 to {MAX_CHOICES} texts, none of them empty", param=param
            )
        found.append(Structure(kind="choice", text=orjson.dumps(choice).decode(), param=param))
    if grammar is not None:
        found.append(Structure(kind="grammar", text=grammar, param=f"{prefix}grammar"))
    return found


def _json(schema: str | dict[str, object], param: str) -> Structure:
    """Return the structure of a schema, which may come as text."""
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except ValueError as exc:
            raise InvalidRequest(f"{param} is not valid JSON", param=param) from exc
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param} must be an object", param=param)
    return Structure(kind="json_schema", text=orjson.dumps(schema).decode(), param=param)
