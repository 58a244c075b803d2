"""What surrounds every handler: request ids, allowed hosts and origins, errors as JSON."""

import ipaddress
import logging
import re
import time
import uuid
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gateway.config import GatewayConfig
from gateway.errors import (
    Forbidden,
    GatewayError,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
)

__all__ = [
    "REQUEST_ID",
    "add_common_headers",
    "add_cors_headers",
    "assign_request_id",
    "error_response",
    "errors_as_json",
    "host_and_origin_guard",
    "log_request",
]

logger = logging.getLogger(__name__)

REQUEST_ID: web.RequestKey[str] = web.RequestKey("REQUEST_ID", str)
_ORIGIN: web.RequestKey[str] = web.RequestKey("_ORIGIN", str)  # an allowed one

_CLIENT_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_PREFLIGHT_MAX_AGE_S = "600"


@web.middleware
async def assign_request_id(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Name the request for logs and answers; a client's own name is only ever echoed."""
    client_id = request.headers.get("X-Request-Id", "")
    echoed = client_id if _CLIENT_REQUEST_ID.fullmatch(client_id) else uuid.uuid4().hex
    request[REQUEST_ID] = echoed
    return await handler(request)


@web.middleware
async def log_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Say at level debug what was asked, without the query: tickets are in it."""
    if not logger.isEnabledFor(logging.DEBUG):
        return await handler(request)
    began_s = time.monotonic()
    status = 499  # the client left, in the words of nginx
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        fields = {
            "request_id": request.get(REQUEST_ID),
            "method": request.method,
            "path": request.path,
            "status": status,
            "duration_s": round(time.monotonic() - began_s, 6),
        }
        logger.debug("answered", extra={"fields": fields})


async def add_common_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: headers of every answer, streamed or not."""
    response.headers["X-Request-Id"] = request.get(REQUEST_ID, "")
    response.headers["Server"] = "headrace"  # and not which versions run here
    response.headers.setdefault("X-Content-Type-Options", "nosniff")
    response.headers.setdefault("Referrer-Policy", "no-referrer")


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every failure into one JSON error, and never show a stack trace."""
    try:
        return await handler(request)
    except GatewayError as exc:
        return error_response(exc)
    except web.HTTPException as exc:
        if exc.status < 400:
            raise
        return error_response(_from_http_exception(request, exc))
    except ConnectionError:
        # The client is gone and nobody reads this; aiohttp would log a raised error as ours.
        return error_response(InvalidRequest("the connection was lost"))
    except Exception:
        logger.exception("request %s: unexpected error", request.get(REQUEST_ID))
        return error_response(InternalError())


def error_response(error: GatewayError) -> web.Response:
    """Return the answer that tells a client of this error."""
    return web.json_response(
        {"error": error.to_wire()}, status=error.status, headers=error.headers()
    )


def _from_http_exception(request: web.Request, exc: web.HTTPException) -> GatewayError:
    match exc:
        case web.HTTPNotFound():
            return NotFound(f"nothing is at {request.path[:100]}")
        case web.HTTPMethodNotAllowed():
            return MethodNotAllowed(exc.method[:20], ", ".join(sorted(exc.allowed_methods)))
        case web.HTTPRequestEntityTooLarge():
            return PayloadTooLarge("the body is larger than allowed")
        case _:
            return GatewayError(
                exc.reason,
                status=exc.status,
                type="invalid_request_error" if exc.status < 500 else "server_error",
            )


def host_and_origin_guard(config: GatewayConfig) -> Middleware:
    """Return the middleware that keeps strange web pages from using a server in reach of a browser.

    A page of another site can send requests here, and by DNS rebinding can even make them look
    like requests of the same origin. So the Host must be a name we know, and an Origin, if there
    is one, must be that of a page which this host serves or which the operator allows.
    The same rule holds for HTTP, event streams and the websocket handshake.
    """
    allowed = _AllowList(config)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        hosts = request.headers.getall("Host", [])
        if len(hosts) != 1 or not allowed.host(hosts[0]):
            raise Forbidden(
                "this Host is not allowed; the server's --allowed-host names those that are",
                code="host_not_allowed",
            )
        origins = request.headers.getall("Origin", [])
        if not origins:
            return await handler(request)
        if len(origins) > 1 or not allowed.origin(origins[0], hosts[0]):
            raise Forbidden(
                "this Origin is not allowed; the server's --allowed-origin names those that are",
                code="origin_not_allowed",
            )
        request[_ORIGIN] = origins[0]
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            return web.Response(status=204, headers=_preflight_headers(request))
        return await handler(request)

    return guard


async def add_cors_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: let the page of an allowed origin read the answer."""
    if (origin := request.get(_ORIGIN)) is not None:
        response.headers["Access-Control-Allow-Origin"] = origin
        rates = [name for name in response.headers if name.startswith("x-ratelimit-")]
        exposed = ", ".join(["X-Request-Id", "Retry-After", *rates])
        response.headers["Access-Control-Expose-Headers"] = exposed
        response.headers["Vary"] = "Origin"


def _preflight_headers(request: web.Request) -> dict[str, str]:
    return {
        "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
        "Access-Control-Allow-Headers": request.headers.get(
            "Access-Control-Request-Headers", "Content-Type"
        ),
        "Access-Control-Max-Age": _PREFLIGHT_MAX_AGE_S,
    }


class _AllowList:
    """Which Host and Origin headers are ours."""

    def __init__(self, config: GatewayConfig) -> None:
        self._hosts = {
            *_LOOPBACK_NAMES,
            *(_bracketed(name.lower()) for name in (config.host, *config.allowed_hosts) if name),
        }
        self._any_address = config.listens_everywhere
        self._origins = frozenset(origin.lower() for origin in config.allowed_origins)

    def host(self, header: str) -> bool:
        if "*" in self._hosts:
            return True
        name = _host_name(header)
        # A rebinding attack needs a name; nobody can rebind a bare address.
        return name in self._hosts or (self._any_address and _is_address(name))

    def origin(self, origin: str, host: str) -> bool:
        origin = origin.lower()
        if origin in self._origins or "*" in self._origins:
            return True
        return origin in (f"http://{host.lower()}", f"https://{host.lower()}")


def _host_name(header: str) -> str:
    """Return the name in a Host header, without the port; "" for nonsense."""
    try:
        parts = urlsplit(f"//{header}")
        name = parts.hostname or ""
        _ = parts.port  # raises for a port that is no number
    except ValueError:
        return ""
    return _bracketed(name) if parts.netloc == header and not parts.username else ""


def _bracketed(name: str) -> str:
    return f"[{name}]" if ":" in name and not name.startswith("[") else name


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
