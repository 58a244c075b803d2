"""The application: what each address answers, and what surrounds every handler."""

import asyncio

from aiohttp import web

from gateway import authentication, openapi, operations, pages, steps, stream_events, usage
from gateway.account_metrics import AccountCollector
from gateway.app_keys import CONFIG, ENGINE, GENERATOR, KEY_RING, METRICS, VERSION
from gateway.authentication import add_rate_headers, authenticate
from gateway.config import GatewayConfig
from gateway.connection_guard import tell_guard
from gateway.connections import DRAINING, STREAM_CONNECTIONS, close_all
from gateway.generation import TextGenerator
from gateway.key_ring import KeyRing
from gateway.metrics import Metrics
from gateway.middleware import (
    add_common_headers,
    add_cors_headers,
    assign_request_id,
    errors_as_json,
    host_and_origin_guard,
    log_request,
)
from gateway.openai import models, tokenize
from gateway.openai.chat import chat_completions
from gateway.openai.completions import completions
from gateway.openai.responses import handlers as responses
from gateway.resumption import RESUME_STORE, ResumeStore
from gateway.websocket import stream_handler

__all__ = ["build_app"]


def build_app(
    config: GatewayConfig, generator: TextGenerator, metrics: Metrics, keys: KeyRing
) -> web.Application:
    """Return the application; `gateway.server.Server` runs it.

    The metrics are those that the generator observes into; the engine's are added here.
    """
    app = web.Application(
        middlewares=[
            tell_guard,
            assign_request_id,
            log_request,
            errors_as_json,
            host_and_origin_guard(config),
            authenticate,
        ],
        client_max_size=config.max_body_bytes,
    )
    app[CONFIG] = config
    app[ENGINE] = generator.engine
    app[GENERATOR] = generator
    app[KEY_RING] = keys
    app[METRICS] = metrics
    app[VERSION] = operations.server_version()
    metrics.watch_engine(generator.engine.stats)
    metrics.watch(AccountCollector(lambda: keys.accounts, config.model_name))
    app[STREAM_CONNECTIONS] = set()
    app[DRAINING] = asyncio.Event()
    app[RESUME_STORE] = store = ResumeStore(generator, config)
    metrics.streams_waiting.set_function(lambda: store.num_waiting)
    metrics.resume_bytes.set_function(lambda: store.num_bytes)
    operations.add_routes(app)
    authentication.add_routes(app)
    usage.add_routes(app)
    pages.add_routes(app)
    steps.add_routes(app)
    models.add_routes(app)
    tokenize.add_routes(app)
    openapi.add_routes(app)
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/chat/completions", chat_completions)
    responses.add_routes(app)
    app.router.add_get("/v1/stream", stream_handler)
    stream_events.add_routes(app)
    app.on_response_prepare.append(add_common_headers)
    app.on_response_prepare.append(add_rate_headers)
    app.on_response_prepare.append(add_cors_headers)
    app.on_shutdown.append(close_all)
    app.on_shutdown.append(_close_resume_store)
    return app


async def _close_resume_store(app: web.Application) -> None:
    """End what no connection carries; after `close_all` that is everything."""
    await app[RESUME_STORE].close()
