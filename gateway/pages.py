"""The pages and what they load: a few files, read once, served with a strict policy."""

import mimetypes
from importlib import resources
from importlib.resources.abc import Traversable

from aiohttp import web

from gateway.errors import NotFound

__all__ = ["CONTENT_SECURITY_POLICY", "add_routes"]

CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'self'",
        "connect-src 'self' ws: wss:",
        "img-src 'self' data:",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)

INDEX = "index.html"
DASHBOARD = "dashboard.html"
DOCS = "docs.html"


def add_routes(app: web.Application, folder: Traversable | None = None) -> None:
    """Serve `/`, `/dashboard`, `/docs` and `/static/NAME` from this folder, or the package's."""
    pages = _Pages(folder if folder is not None else resources.files("gateway") / "static")
    app.router.add_get("/", pages.index)
    app.router.add_get("/dashboard", pages.dashboard)
    app.router.add_get("/docs", pages.docs)
    app.router.add_get("/static/{name}", pages.file)


class _Pages:
    """Files by name; a name that is not in the folder cannot lead anywhere else."""

    def __init__(self, folder: Traversable) -> None:
        self._files = {
            entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()
        }

    async def index(self, _request: web.Request) -> web.Response:
        return self._response(INDEX)

    async def dashboard(self, _request: web.Request) -> web.Response:
        return self._response(DASHBOARD)

    async def docs(self, _request: web.Request) -> web.Response:
        return self._response(DOCS)

    async def file(self, request: web.Request) -> web.Response:
        return self._response(request.match_info["name"])

    def _response(self, name: str) -> web.Response:
        if name not in self._files:
            raise NotFound(f"there is no page {name[:100]}")
        content_type, _ = mimetypes.guess_type(name)
        return web.Response(
            body=self._files[name],
            content_type=content_type or "application/octet-stream",
            charset="utf-8",
            headers={
                "Content-Security-Policy": CONTENT_SECURITY_POLICY,
                "Cache-Control": "no-cache",
            },
        )
