"""What an answer must look like where a call is forced: a schema made of those of the tools."""

from collections.abc import Mapping, Sequence

from gateway.grammars import Structure
from gateway.openai.protocol import FunctionBody
from gateway.token_fields import json_structure

__all__ = ["arguments_structure", "calls_structure"]

MAX_CALLS = 16  # of one forced answer, so that it ends
ANY_ARGUMENTS: Mapping[str, object] = {"type": "object"}
DEFINITIONS = ("$defs", "definitions")


def arguments_structure(function: FunctionBody, *, index: int) -> Structure:
    """Return the structure of an answer that is the arguments of this tool.

    Args:
        function: what must be called.
        index: its place among the tools, for errors.

    Raises:
        InvalidRequest: its schema cannot be read.
    """
    return json_structure(_parameters(function), _path(index))


def calls_structure(functions: Sequence[FunctionBody], *, max_calls: int | None) -> Structure:
    """Return the structure of an answer that is a list of calls, at least one.

    Raises:
        InvalidRequest: the schema of one cannot be read.
    """
    definitions: dict[str, object] = {}
    calls = []
    for index, function in enumerate(functions):
        schema = _parameters(function)
        json_structure(schema, _path(index))  # if it cannot be read, it is named
        for key in DEFINITIONS:
            own = schema.pop(key, None)
            if isinstance(own, dict):
                # Definitions must be at the root; two tools may use the same names for theirs.
                definitions |= {
                    f"{index}_{name}": _moved(definition, index) for name, definition in own.items()
                }
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": function.name},
                    "arguments": _moved(schema, index),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema = {
        "$defs": definitions,
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_CALLS if max_calls is None else max_calls,
        "items": {"anyOf": calls},
    }
    return json_structure(schema, "tools")


def _moved(schema: object, index: int) -> object:
    """The schema with references to where its definitions are now."""
    if isinstance(schema, dict):
        return {
            key: _moved_reference(value, index)
            if key == "$ref" and isinstance(value, str)
            else _moved(value, index)
            for key, value in schema.items()
        }
    if isinstance(schema, list):
        return [_moved(item, index) for item in schema]
    return schema


def _moved_reference(reference: str, index: int) -> str:
    for key in DEFINITIONS:
        prefix = f"#/{key}/"
        if reference.startswith(prefix):
            return f"#/$defs/{index}_{reference.removeprefix(prefix)}"
    return reference


def _parameters(function: FunctionBody) -> dict[str, object]:
    return {**ANY_ARGUMENTS, **(function.parameters or {})}


def _path(index: int) -> str:
    return f"tools[{index}].function.parameters"
