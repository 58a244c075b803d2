"""HTTP bodies: read within bounds, decoded strictly, and checked against a type."""

import asyncio
import json
import re

import aiohttp
import msgspec
import orjson
from aiohttp import web

from gateway.app_keys import CONFIG
from gateway.errors import (
    InvalidRequest,
    PayloadTooLarge,
    RequestTimeout,
    UnsupportedMediaType,
    sanitize,
)

__all__ = ["convert", "decode_object", "read_object"]

# Decoding holds the event loop; a body of commas alone would hold it for half a second.
MAX_COMMAS = 500_000

CONTENT_ENCODINGS = frozenset({"identity", "gzip", "deflate"})

_AT_PATH = re.compile(r"^(?P<problem>.*?) - at `\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_MISSING_FIELD = re.compile(r"missing required field `(?P<name>[^`]*)`")


async def read_object(request: web.Request) -> dict[str, object]:
    """Return the JSON object in the body of a request.

    Cancelling is safe.

    Raises:
        gateway.errors.GatewayError: UnsupportedMediaType (415), PayloadTooLarge (413),
            RequestTimeout (408), InvalidRequest (400).
    """
    config = request.app[CONFIG]
    charset = (request.charset or "utf-8").lower()
    if request.content_type != "application/json" or charset != "utf-8":
        raise UnsupportedMediaType("Content-Type must be application/json in UTF-8")
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in CONTENT_ENCODINGS:  # aiohttp would take the bytes as they are
        raise UnsupportedMediaType("Content-Encoding must be gzip, deflate or identity")
    if request.content_length is not None and request.content_length > config.max_body_bytes:
        raise PayloadTooLarge(f"the body may have at most {config.max_body_bytes} bytes")
    try:
        async with asyncio.timeout(config.body_read_timeout_s):
            body = await request.read()
    except TimeoutError:
        raise RequestTimeout(
            f"the body did not arrive within {config.body_read_timeout_s:g} seconds"
        ) from None
    except (web.RequestPayloadError, aiohttp.ClientPayloadError, aiohttp.http.HttpProcessingError):
        raise InvalidRequest("the body could not be read as sent") from None
    return decode_object(body)


def decode_object(body: bytes) -> dict[str, object]:
    """Return a JSON object, refusing what parsers read differently.

    That is: invalid UTF-8, lone surrogates, NaN, numbers out of range, keys that come twice.

    Raises:
        InvalidRequest: the body is no such object.
    """
    if not body.strip():
        raise InvalidRequest("the body is empty; a JSON object is expected")
    if body.count(b",") > MAX_COMMAS:
        raise InvalidRequest(f"the body may hold at most {MAX_COMMAS} commas")
    try:
        orjson.loads(body)  # the strict one, but it turns large integers into floats ...
        value = json.loads(body, object_pairs_hook=_without_duplicates)  # ... and this one does not
    except (ValueError, RecursionError) as exc:
        problem = (
            "it is nested too deeply" if isinstance(exc, RecursionError) else sanitize(str(exc))
        )
        raise InvalidRequest(f"the body is not valid JSON: {problem}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def convert[T](value: object, type_: type[T]) -> T:
    """Return the value as this type.

    Raises:
        InvalidRequest: it does not fit; `param` is the path of the field at fault.
    """
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as exc:
        problem, param = str(exc), None
        if match := _AT_PATH.match(problem):
            problem, param = match["problem"], match["path"] or None
        if match := _MISSING_FIELD.search(problem):
            param = f"{param}.{match['name']}" if param else match["name"]
            problem = "is required"
        message = f"{param}: {problem}" if param else problem
        raise InvalidRequest(message, param=param) from None


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key '{key[:100]}' comes twice")
            seen.add(key)
    return result
