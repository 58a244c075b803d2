"""Structured output as OpenAI's clients ask for it, and as older ones of vLLM do."""

from gateway.errors import InvalidRequest
from gateway.grammars import Structure
from gateway.openai.protocol import ResponseFormat, SamplingBody
from gateway.token_fields import ANY_OBJECT, json_structure, structures_of, tag_structure

__all__ = ["structures_of_body"]


def structures_of_body(body: SamplingBody) -> list[Structure]:
    """Return what `response_format` and `guided_...` ask for.

    Raises:
        InvalidRequest: one that is no structure.
    """
    return [
        *_of_response_format(body.response_format),
        *structures_of(
            "guided_",
            json=body.guided_json,
            regex=body.guided_regex,
            choice=body.guided_choice,
            grammar=body.guided_grammar,
        ),
    ]


def _of_response_format(wanted: ResponseFormat | None) -> list[Structure]:
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [Structure(kind="json_schema", text=ANY_OBJECT, param="response_format")]
    if wanted.type == "structural_tag":
        if wanted.format is not None:
            param = "response_format.format"
            raise InvalidRequest(
                f"{param} is not supported: give structures and triggers",
                param=param,
                code="unsupported_parameter",
            )
        return [tag_structure(wanted.structures, wanted.triggers, "response_format")]
    if wanted.type != "json_schema":
        raise InvalidRequest(
            f"response_format.type must be text, json_object, json_schema or structural_tag, "
            f"got '{wanted.type[:40]}'",
            param="response_format.type",
        )
    param = "response_format.json_schema"
    if wanted.json_schema is None:
        raise InvalidRequest(f"{param} is required", param=param)
    if wanted.json_schema.schema is None:
        raise InvalidRequest(f"{param}.schema is required", param=f"{param}.schema")
    return [json_structure(wanted.json_schema.schema, f"{param}.schema")]
