"""Finds out who asks, before any handler runs, and keeps out who may not."""

from aiohttp import web
from aiohttp.typedefs import Handler

from gateway.app_keys import KEY_RING
from gateway.callers import CALLER, Caller, caller_of
from gateway.errors import Forbidden, InvalidRequest
from gateway.key_ring import TICKET_LIFETIME_S, KeyRing

__all__ = ["add_rate_headers", "add_routes", "authenticate"]

# What needs no key: probes, and pages, which hold nothing of anybody. All else does, also what is
# not there, so that strangers cannot find out what is.
PUBLIC_ROUTES = frozenset({"/", "/dashboard", "/docs", "/static/{name}", "/health", "/ready"})

# What concerns all: whoever sees it learns how much the others send, and when.
ADMIN_ROUTES = frozenset({"/metrics", "/v1/steps", "/v1/steps/stream", "/v1/steps/trace"})

# The websockets: all that a ticket opens. Elsewhere it could be traded for the next one for ever.
TICKET_ROUTES = frozenset({"/v1/stream", "/v1/steps/stream", "/v1/responses"})


def add_routes(app: web.Application) -> None:
    """Serve /v1/ws-ticket."""
    app.router.add_post("/v1/ws-ticket", ticket)


@web.middleware
async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Say who asks, as `caller_of`, or refuse: 401 without a key, 403 where it does not suffice."""
    # The route, not the path: that may be spelled in many ways.
    resource = request.match_info.route.resource
    route = None if resource is None else resource.canonical
    if route in PUBLIC_ROUTES:
        return await handler(request)
    caller = _caller(request, route, request.app[KEY_RING])
    if route in ADMIN_ROUTES and not caller.is_admin:
        raise Forbidden("this needs an admin's API key", code="admin_key_required")
    request[CALLER] = caller
    return await handler(request)


async def add_rate_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: tell a key with rates what is left of them."""
    if (caller := request.get(CALLER)) is not None:
        response.headers.update(caller.account.rate_headers())


def _caller(request: web.Request, route: str | None, keys: KeyRing) -> Caller:
    """Return the caller by the ticket of a websocket handshake, or else by the key."""
    is_handshake = (
        request.method == "GET"
        and route in TICKET_ROUTES
        and request.headers.get("Upgrade", "").lower() == "websocket"
    )
    tickets = request.query.getall("ticket", []) if is_handshake else []
    if not tickets:
        return keys.caller(_authorization(request))
    if len(tickets) > 1:
        raise InvalidRequest("ticket comes twice", param="ticket")
    return keys.redeem(tickets[0])


def _authorization(request: web.Request) -> str | None:
    headers = request.headers.getall("Authorization", [])
    if len(headers) > 1:
        raise InvalidRequest("Authorization comes twice", param="Authorization")
    return headers[0] if headers else None


async def ticket(request: web.Request) -> web.Response:
    """Trade a key for a ticket."""
    return web.json_response(
        {
            "ticket": request.app[KEY_RING].issue_ticket(caller_of(request)),
            "expires_in_s": TICKET_LIFETIME_S,
        },
        headers={"Cache-Control": "no-store"},
    )
