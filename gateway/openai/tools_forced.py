"""What an answer must look like where a call is forced: a schema made of those of the tools."""

from collections.abc import Mapping, Sequence

import orjson

from gateway.grammars import Structure
from gateway.openai.protocol import FunctionBody

__all__ = ["arguments_structure", "calls_structure"]

MAX_CALLS = 16  # of one forced answer, so that it ends
ANY_ARGUMENTS: Mapping[str, object] = {"type": "object"}
DEFINITIONS = ("$defs", "definitions")


def arguments_structure(function: FunctionBody, *, index: int) -> Structure:
    """Return the structure of an answer that is the arguments of this tool.

    Args:
        function: what must be called.
        index: its place among the tools, for errors.
    """
    schema = {**ANY_ARGUMENTS, **(function.parameters or {})}
    return _structure(schema, f"tools[{index}].function.parameters")


def calls_structure(functions: Sequence[FunctionBody], *, max_calls: int | None) -> Structure:
    """Return the structure of an answer that is a list of calls, at least one."""
    definitions: dict[str, object] = {}
    calls = []
    for index, function in enumerate(functions):
        schema = {**ANY_ARGUMENTS, **(function.parameters or {})}
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
    return _structure(schema, "tools")


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


def _structure(schema: Mapping[str, object], param: str) -> Structure:
    return Structure(kind="json_schema", text=orjson.dumps(schema).decode(), param=param)
