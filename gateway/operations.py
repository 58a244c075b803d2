"""What operators and load balancers ask: is it alive, is it ready, which numbers, which version."""

import functools
from importlib import metadata

from aiohttp import web

from gateway.app_keys import ENGINE, METRICS, VERSION

__all__ = ["add_routes", "server_version"]


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
    """Say whether the process should live on: 503 only once the engine is dead."""
    engine = request.app[ENGINE]
    if engine.failure is not None:
        # Anybody may ask: what it died of is in the log.
        return web.json_response({"status": "dead"}, status=503)
    return web.json_response({"status": "ok" if engine.is_ready else "not_ready"})


async def ready(request: web.Request) -> web.Response:
    """Say whether requests are accepted."""
    engine = request.app[ENGINE]
    if engine.is_ready:
        return web.json_response({"status": "ready"})
    status = "dead" if engine.failure is not None else "not_ready"
    return web.json_response({"status": status}, status=503, headers={"Retry-After": "5"})


async def metrics(request: web.Request) -> web.Response:
    body, content_type = request.app[METRICS].render(request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type})


async def version(request: web.Request) -> web.Response:
    return web.json_response({"version": request.app[VERSION]})
