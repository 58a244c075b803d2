"""A server that speaks the stream protocol as badly as a test wants."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import WSMsgType, web
from aiohttp.test_utils import TestServer

__all__ = ["DONE", "HELLO", "ScriptedSocket", "delta", "done", "scripted_server"]

HELLO = {
    "type": "hello",
    "server": "scripted",
    "version": 1,
    "model": "m",
    "limits": {"max_model_len": 1, "max_streams": 1, "max_message_bytes": 1},
    "heartbeat_s": 20,
}
DONE = {
    "finish_reason": "stop",
    "stop_reason": None,
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "cached_tokens": 0},
    "timing": {
        "queue_s": 0,
        "ttft_s": 0.5,
        "prefill_s": 0.5,
        "decode_s": 1,
        "e2e_s": 1.5,
        "itl_mean_s": None,
        "itl_p50_s": None,
        "itl_p99_s": None,
        "itl_max_s": None,
        "num_preemptions": 0,
    },
}


def delta(stream_id: str, seq: int, text: str) -> dict[str, Any]:
    return {"type": "delta", "id": stream_id, "seq": seq, "text": text}


def done(stream_id: str, seq: int, **fields: Any) -> dict[str, Any]:
    return {"type": "done", "id": stream_id, "seq": seq, **DONE, **fields}


class ScriptedSocket:
    """The server's end of one connection."""

    def __init__(self, ws: web.WebSocketResponse) -> None:
        self.ws = ws

    async def send(self, *messages: dict[str, Any]) -> None:
        for message in messages:
            await self.ws.send_frame(orjson.dumps(message), WSMsgType.TEXT)

    async def receive(self) -> dict[str, Any]:
        return orjson.loads((await self.ws.receive()).data)

    async def accept(self) -> str:
        """Take a start message, accept it, and return its id."""
        message = await self.receive()
        assert message["type"] == "start"
        await self.send(
            {"type": "accepted", "id": message["id"], "request_id": "r", "prompt_tokens": 1}
        )
        return message["id"]

    async def wait_closed(self) -> int | None:
        """Read until the client closes; return its close code."""
        while (await self.ws.receive()).type is WSMsgType.TEXT:
            pass
        return self.ws.close_code


@asynccontextmanager
async def scripted_server(
    script: Callable[[ScriptedSocket], Awaitable[Any]], *, hello: Any = HELLO
) -> AsyncIterator[str]:
    """Run `script` for each connection; yield the base URL. A failing script fails the test."""
    failures: list[BaseException] = []

    async def handler(request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse(protocols=["headrace.v1.json"], timeout=0.1)
        await ws.prepare(request)
        socket = ScriptedSocket(ws)
        try:
            if hello is not None:
                await socket.send(hello)
            await script(socket)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            failures.append(error)
            raise
        return ws

    app = web.Application()
    app.router.add_get("/v1/stream", handler)
    async with TestServer(app) as server:
        yield str(server.make_url("/"))
    if failures:
        raise failures[0]
