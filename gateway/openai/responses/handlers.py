"""/v1/responses over HTTP: create, look at, follow, cancel, forget."""

import contextlib
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from aiohttp import web

from gateway.app_keys import CONFIG, GENERATOR
from gateway.callers import caller_of
from gateway.errors import InternalError, InvalidRequest, NotFound
from gateway.json_body import read_object
from gateway.openai.responses.creation import create_run, read_body
from gateway.openai.responses.input_items import input_item_page
from gateway.openai.responses.protocol import DeletedResponse, Event, ResponseEvent
from gateway.openai.responses.run import ResponseRun
from gateway.openai.responses.service import RESPONSES, ResponseService
from gateway.openai.responses.store import StoredResponse
from gateway.openai.responses.websocket import responses_handler
from gateway.sse import EventStream, event

__all__ = ["add_routes"]

logger = logging.getLogger(__name__)


def add_routes(app: web.Application) -> None:
    """Serve /v1/responses; what runs in the background ends with the application."""
    app[RESPONSES] = ResponseService(app[CONFIG].response_store_bytes)
    app.router.add_post("/v1/responses", create)
    app.router.add_get("/v1/responses", responses_handler)
    app.router.add_get("/v1/responses/{response_id}", retrieve, allow_head=False)
    app.router.add_delete("/v1/responses/{response_id}", delete)
    app.router.add_post("/v1/responses/{response_id}/cancel", cancel)
    app.router.add_get("/v1/responses/{response_id}/input_items", input_items)
    app.on_shutdown.append(_close)


async def create(request: web.Request) -> web.StreamResponse:
    """Handle POST /v1/responses."""
    body = read_body(await read_object(request))
    service, caller = request.app[RESPONSES], caller_of(request)
    run = await create_run(
        body,
        caller=caller,
        generator=request.app[GENERATOR],
        config=request.app[CONFIG],
        stores=[service.store],
    )
    if body.background:
        stored = await service.start(caller.principal, run)
        return await _followed(request, stored, -1) if body.stream else _json(stored.response)
    if body.stream:
        return await _streamed(request, run, caller.principal)
    async with aclosing(run.events()) as events:
        async for _ in events:
            pass
    if run.failure is not None:
        raise run.failure
    service.keep(caller.principal, run)
    return _json(run.response)


async def retrieve(request: web.Request) -> web.StreamResponse:
    """Handle GET /v1/responses/{id}, perhaps with stream=true and starting_after."""
    stored = _stored(request)
    if request.query.get("stream", "false").lower() not in ("true", "1"):
        return _json(stored.response)
    after = request.query.get("starting_after", "-1")
    if not after.removeprefix("-").isdecimal() or len(after) > 18:
        raise InvalidRequest("starting_after must be a sequence number", param="starting_after")
    return await _followed(request, stored, max(int(after), -1))


async def input_items(request: web.Request) -> web.StreamResponse:
    """Handle GET /v1/responses/{id}/input_items."""
    stored = _stored(request)
    return _json(input_item_page(stored.response.id, stored.inputs, request.query))


async def cancel(request: web.Request) -> web.StreamResponse:
    """Handle POST /v1/responses/{id}/cancel. Cancelling what has ended changes nothing."""
    stored = _stored(request)
    if stored.cancel is None:
        raise InvalidRequest("only a response in the background can be cancelled")
    stored.cancel()
    await stored.wait_ended()
    return _json(stored.response)


async def delete(request: web.Request) -> web.StreamResponse:
    """Handle DELETE /v1/responses/{id}; a response that runs ends."""
    response_id = request.match_info["response_id"]
    stored = request.app[RESPONSES].store.delete(caller_of(request).principal, response_id)
    if stored is None:
        raise _not_found(response_id)
    if stored.cancel is not None:
        stored.cancel()
    return _json(DeletedResponse(id=response_id))


async def _streamed(request: web.Request, run: ResponseRun, owner: str) -> web.StreamResponse:
    """Answer with events; a client that leaves aborts the request."""
    config, service = request.app[CONFIG], request.app[RESPONSES]
    batches = run.events(idle_s=config.sse_keep_alive_interval_s)
    async with aclosing(batches):
        first = await anext(batches)  # before the stream is open, a refusal has its status
        stream = EventStream(request, send_timeout_s=config.send_timeout_s)
        with contextlib.suppress(ConnectionError):
            await stream.open()
            try:
                await _send(stream, first)
                async for batch in batches:
                    if run.has_ended:
                        # Before the client knows, so that it can go on with it at once.
                        service.keep(owner, run)
                    await _send(stream, batch)
            except ConnectionError:
                raise
            except Exception:
                logger.exception("a response could not be sent")
                await _send(stream, run.fail(InternalError()))
            await stream.close()
    return stream.response


async def _followed(request: web.Request, stored: StoredResponse, after: int) -> web.StreamResponse:
    """Answer with the events of a response that runs in the background, whoever else does."""
    if stored.events is None:
        raise InvalidRequest("only a response in the background keeps its events", param="stream")
    config = request.app[CONFIG]
    stream = EventStream(request, send_timeout_s=config.send_timeout_s)
    with contextlib.suppress(ConnectionError):
        await stream.open()
        batches: AsyncGenerator[list[bytes] | None] = stored.follow(
            after, idle_s=config.sse_keep_alive_interval_s
        )
        async with aclosing(batches):
            async for batch in batches:
                if batch is None:
                    await stream.send_keep_alive()
                else:
                    await stream.send(_named(data) for data in batch)
        await stream.close()
    return stream.response


async def _send(stream: EventStream, batch: list[Event] | None) -> None:
    if batch is None:
        await stream.send_keep_alive()
    else:
        await stream.send(
            event(msgspec.json.encode(item), name=str(item["type"])) for item in batch
        )


def _named(data: bytes) -> bytes:
    return event(data, name=msgspec.json.decode(data, type=ResponseEvent).type)


def _stored(request: web.Request) -> StoredResponse:
    response_id = request.match_info["response_id"]
    service: ResponseService = request.app[RESPONSES]
    stored = service.store.get(caller_of(request).principal, response_id)
    if stored is None:
        raise _not_found(response_id)
    return stored


def _not_found(response_id: str) -> NotFound:
    return NotFound(f"the response '{response_id[:100]}' is not there, or no more", param="id")


def _json(body: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


async def _close(app: web.Application) -> None:
    await app[RESPONSES].close()
