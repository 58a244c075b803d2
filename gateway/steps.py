"""What every step did, for people and tools: as JSON, live, and as a trace."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence

import orjson
from aiohttp import web

from gateway.app_keys import CONFIG, ENGINE
from gateway.callers import caller_of
from gateway.connections import accept_websocket, check_room, serve_connection
from gateway.errors import InvalidRequest
from gateway.step_feed import StepFeed
from gateway.step_messages import clock_body, step_bodies
from gateway.step_trace import trace_events
from jaxengine.step_log import StepLog, StepRecord

__all__ = ["add_routes"]

DEFAULT_STEPS = 100
MAX_STEPS = 1000  # in one answer
MAX_INDEX = 2**53  # what JavaScript counts exactly
MAX_CLIENT_MESSAGE_BYTES = 4096  # a watcher has nothing to say
TRACE_CHUNK_EVENTS = 1000  # encoded at a time, a few milliseconds of the event loop


def add_routes(app: web.Application) -> None:
    """Serve /v1/steps, /v1/steps/stream and /v1/steps/trace."""
    app.router.add_get("/v1/steps", steps)
    app.router.add_get("/v1/steps/stream", step_stream)
    app.router.add_get("/v1/steps/trace", step_trace, allow_head=False)


async def steps(request: web.Request) -> web.Response:
    """Return steps: the oldest kept ones after `after`, or else the newest, at most `limit`."""
    limit = _integer(request, "limit", 1, MAX_STEPS) or DEFAULT_STEPS
    after = _integer(request, "after", -1, MAX_INDEX)
    with_shares = _flag(request, "shares")
    log = request.app[ENGINE].steps
    if after is None:
        records = log.after(log.last_index - limit)
        after = records[0].index - 1 if records else -1
    else:
        after = _known(log, after)
        records = log.after(after)[:limit]
    body = {
        "steps": step_bodies(records, with_shares=with_shares),
        "last_index": log.last_index,
        "next_after": records[-1].index if records else after,
        "num_missed": records[0].index - after - 1 if records else 0,
        **clock_body(),
    }
    return web.Response(
        body=orjson.dumps(body),
        content_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


async def step_stream(request: web.Request) -> web.StreamResponse:
    """Serve the live feed; it begins with the step after `after`, or else with the next one.

    It also works while the engine drains or is dead: that is when one wants to look.

    Raises:
        GatewayError: before the upgrade, when none is asked for or a parameter is wrong (400), or
            there is no room for another connection (503).
    """
    if request.headers.get("Upgrade", "").lower() != "websocket":
        raise InvalidRequest("this is a websocket endpoint", code="upgrade_required")
    engine, config = request.app[ENGINE], request.app[CONFIG]
    after = _integer(request, "after", -1, MAX_INDEX)
    with_shares = _flag(request, "shares")
    check_room(request.app)
    ws = await accept_websocket(request, max_message_bytes=MAX_CLIENT_MESSAGE_BYTES)
    feed = StepFeed(
        ws,
        request.transport,
        engine,
        config,
        account=caller_of(request).account,
        after=_known(engine.steps, after),
        with_shares=with_shares,
    )
    await serve_connection(request.app, feed)
    return ws


async def step_trace(request: web.Request) -> web.StreamResponse:
    """Send all kept steps as a trace, piece by piece: it can have many megabytes."""
    response = web.StreamResponse(
        headers={
            "Content-Type": "application/json",
            "Content-Disposition": 'attachment; filename="headrace-trace.json"',
            "Cache-Control": "no-store",
        }
    )
    await response.prepare(request)
    send_timeout_s = request.app[CONFIG].send_timeout_s
    try:
        for chunk in _trace_chunks(request.app[ENGINE].steps.after(-1)):
            async with asyncio.timeout(send_timeout_s):
                await response.write(chunk)
            await asyncio.sleep(0)  # streams go first
        async with asyncio.timeout(send_timeout_s):
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    return response


def _trace_chunks(records: Sequence[StepRecord]) -> Iterator[bytes]:
    """Yield one JSON object in pieces."""
    origin_s = records[0].scheduled_s if records else 0.0
    about = {"clock": "seconds of the server's monotonic clock", "origin_s": origin_s}
    head = orjson.dumps({"displayTimeUnit": "ms", "otherData": about})
    yield head[:-1] + b',"traceEvents":['
    events = itertools.chain.from_iterable(trace_events(records, origin_s=origin_s))
    separator = b"\n"
    for chunk in itertools.batched(events, TRACE_CHUNK_EVENTS):
        yield separator + b",\n".join(map(orjson.dumps, chunk))
        separator = b",\n"
    yield b"\n]}\n"


def _known(log: StepLog, after: int | None) -> int:
    """Return where a reader stands: an index from before a restart may lie ahead of us."""
    return log.last_index if after is None else min(after, log.last_index)


def _integer(request: web.Request, name: str, least: int, most: int) -> int | None:
    text = _parameter(request, name)
    if text is None:
        return None
    if not text.removeprefix("-").isdecimal() or not text.isascii() or len(text) > 20:
        raise InvalidRequest(f"{name} must be an integer", param=name)
    value = int(text)
    if not least <= value <= most:
        raise InvalidRequest(f"{name} must be in [{least}, {most}], got {value}", param=name)
    return value


def _flag(request: web.Request, name: str) -> bool:
    text = _parameter(request, name)
    if text not in (None, "0", "1"):
        raise InvalidRequest(f"{name} must be 0 or 1", param=name)
    return text == "1"


def _parameter(request: web.Request, name: str) -> str | None:
    values = request.query.getall(name, [])
    if len(values) > 1:
        raise InvalidRequest(f"{name} comes twice", param=name)
    return values[0] if values else None
