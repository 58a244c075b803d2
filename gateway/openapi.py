"""GET /openapi.json: what the server understands, generated from the types that check requests."""

import orjson
from aiohttp import web
from msgspec.json import schema_components

from gateway.app_keys import VERSION
from gateway.openapi_bodies import ErrorBody
from gateway.openapi_routes import ERRORS, OPERATIONS, Content, Operation

__all__ = ["add_routes", "document"]

type Schemas = dict[object, dict[str, object]]

DESCRIPTION = (
    "LLM serving, compatible with the OpenAI API. Fields that are not listed are ignored, and "
    "optional ones may be null. The native websocket protocol is described in docs/protocol.md."
)


def add_routes(app: web.Application) -> None:
    """Serve the document, which is made once."""
    body = orjson.dumps(document(app[VERSION]))

    async def openapi(_request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    app.router.add_get("/openapi.json", openapi)


def document(version: str) -> dict[str, object]:
    """Return the OpenAPI 3.1 document of every route."""
    types = list(dict.fromkeys(_types()))
    schemas, components = schema_components(
        types, schema_hook=_schema_of_anything, ref_template="#/components/schemas/{name}"
    )
    schema_of: Schemas = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, object]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "headrace", "version": version, "description": DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {
                str(status): {
                    "description": text,
                    "content": {"application/json": {"schema": schema_of[ErrorBody]}},
                }
                for status, text in ERRORS.items()
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        # A key is needed only where the operator has set one.
        "security": [{}, {"key": []}],
    }


def _schema_of_anything(type_: object) -> dict[str, object]:
    """Describe what msgspec takes unchecked."""
    if type_ is object:
        return {"description": "Any JSON value."}
    raise NotImplementedError(f"a schema for {type_!r}")


def _types() -> list[object]:
    types: list[object] = [ErrorBody]
    for operation in OPERATIONS:
        types += [parameter.type for parameter in operation.parameters]
        types += [operation.body] if operation.body is not None else []
        for _, contents in operation.answers.values():
            types += [content.type for content in contents if content.type is not None]
    return types


def _operation(operation: Operation, schema_of: Schemas) -> dict[str, object]:
    words = operation.path.strip("/").replace("{", "").replace("}", "").replace(".", "/").split("/")
    described: dict[str, object] = {
        **({} if operation.needs_key else {"security": []}),
        "operationId": "_".join([operation.method, *filter(None, words)]),
        "summary": operation.summary,
        "responses": {
            **{
                str(status): {
                    "description": text,
                    **(
                        {"content": {c.media_type: _media(c, schema_of) for c in contents}}
                        if contents
                        else {}
                    ),
                }
                for status, (text, contents) in operation.answers.items()
            },
            **{
                str(status): {"$ref": f"#/components/responses/{status}"}
                for status in operation.all_errors
            },
        },
    }
    if operation.parameters:
        described["parameters"] = [
            {
                "name": parameter.name,
                "in": parameter.place,
                "required": parameter.place == "path",
                "description": parameter.description,
                "schema": schema_of[parameter.type],
            }
            for parameter in operation.parameters
        ]
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema_of[operation.body]}},
        }
    return described


def _media(content: Content, schema_of: Schemas) -> dict[str, object]:
    """Describe a body; OpenAPI 3.1 has no way to type the events of a stream but words."""
    if content.media_type == "application/json":
        return {"schema": schema_of[content.type]}
    if content.type is None:
        return {}
    ref = str(schema_of[content.type].get("$ref", "")).rpartition("/")[2]
    return {"schema": {"type": "string", "description": f"Each event's data is a {ref}."}}
