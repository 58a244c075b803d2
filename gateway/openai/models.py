"""GET /v1/models: the names that a request may use."""

import time
from typing import Literal

import msgspec
from aiohttp import web

from gateway.app_keys import CONFIG, ENGINE
from gateway.errors import ModelNotFound

__all__ = ["ModelEntry", "ModelList", "add_routes"]


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One name of the model. `root` is the name that we report, `max_model_len` its context."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "headrace"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[ModelEntry]


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
        return _json(ModelList(data=[self._entry(request, name) for name in names]))

    async def one(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in request.app[CONFIG].served_model_names:
            raise ModelNotFound(name)
        return _json(self._entry(request, name))

    def _entry(self, request: web.Request, name: str) -> ModelEntry:
        return ModelEntry(
            id=name,
            created=self._created,
            root=request.app[CONFIG].model_name,
            max_model_len=request.app[ENGINE].limits.max_model_len,
        )


def _json(body: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
