"""What operators and load balancers ask: is it alive, is it ready, which numbers, which version."""

import functools
from importlib import metadata

from aiohttp import web

from gateway.app_keys import ENGINE, METRICS, VERSION
from gateway.step_messages import engine_status

__all__ = ["add_routes", "server_version"]

# Anybody may ask: what it died of, and where it hangs, is in the log.
REASONS = {
    "dead": "the engine has failed",
    "stalled": "no step of the engine has ended within --step-timeout",
}


@functools.cache
def server_version() -> str:
    """Return the version of the installed distribution. The first call reads files."""
    try:
        return metadata.version("headrace")
    except metadata.PackageNotFoundError:
        return "0+source"


def add_routes(app: web.Application) -> None:
    """Serve /health, /ready, /metrics and /version."""
    app.router.add_get("/health", health)
    app.router.add_get("/ready", ready)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/version", version)


async def health(request: web.Request) -> web.Response:
    """Say whether the process should live on: not if the engine is dead, or a step hangs."""
    status = engine_status(request.app[ENGINE])
    if status in REASONS:
        return web.json_response({"status": status, "reason": REASONS[status]}, status=503)
    return web.json_response({"status": "ok" if status == "ready" else status})


async def ready(request: web.Request) -> web.Response:
    """Say whether requests are accepted."""
    status = engine_status(request.app[ENGINE])
    if status == "ready":
        return web.json_response({"status": status})
    return web.json_response({"status": status}, status=503, headers={"Retry-After": "5"})


async def metrics(request: web.Request) -> web.Response:
    body, content_type = request.app[METRICS].render(request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type})


async def version(request: web.Request) -> web.Response:
    return web.json_response({"version": request.app[VERSION]})
