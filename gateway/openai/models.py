"""GET /v1/models: the names that a request may use."""

import time

from aiohttp import web

from gateway.app_keys import CONFIG, ENGINE
from gateway.errors import ModelNotFound

__all__ = ["add_routes"]


def add_routes(app: web.Application) -> None:
    """Serve the list of models, and each of them."""
    models = _Models(created=int(time.time()))
    app.router.add_get("/v1/models", models.all)
    # A name may hold slashes, as hub ids do.
    app.router.add_get("/v1/models/{name:.+}", models.one)


class _Models:
    """One model, under each of its names."""

    def __init__(self, created: int) -> None:
        self._created = created

    async def all(self, request: web.Request) -> web.Response:
        names = request.app[CONFIG].served_model_names
        return web.json_response(
            {"object": "list", "data": [self._entry(request, name) for name in names]}
        )

    async def one(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in request.app[CONFIG].served_model_names:
            raise ModelNotFound(name)
        return web.json_response(self._entry(request, name))

    def _entry(self, request: web.Request, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "headrace",
            "root": request.app[CONFIG].model_name,
            "max_model_len": request.app[ENGINE].limits.max_model_len,
        }
