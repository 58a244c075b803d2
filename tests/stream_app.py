"""The gateway on a FakeEngine, and a bare websocket to talk to it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgpack
import orjson
from aiohttp import ClientWebSocketResponse, WSMsgType, web
from aiohttp.test_utils import TestClient, TestServer

from fakes import ByteChatTemplate, FakeEngine, byte_tokenizer
from gateway.app import build_app
from gateway.config import GatewayConfig
from gateway.connections import STREAM_CONNECTIONS
from gateway.generation import TextGenerator
from gateway.key_ring import KeyRing
from gateway.metrics import Metrics

__all__ = ["MODEL", "Gateway", "RawStream", "serve_streams", "start", "until"]

MODEL = "fake-model"


def make_app(engine: FakeEngine, config: GatewayConfig) -> web.Application:
    metrics = Metrics(config.model_name)
    generator = TextGenerator(
        engine,
        byte_tokenizer(),
        ByteChatTemplate(),
        config=config,
        metrics=metrics,
        clock=engine.clock,
    )
    app = build_app(config, generator, metrics, KeyRing(None))

    async def close_generator(app):
        generator.close()

    app.on_cleanup.append(close_generator)
    return app


class RawStream:
    """A websocket that sends and receives messages as dicts, in one of the encodings."""

    def __init__(self, ws: ClientWebSocketResponse, encoding: str) -> None:
        self.ws = ws
        self.is_json = encoding == "json"

    async def send(self, message: Any) -> None:
        if self.is_json:
            await self.ws.send_frame(orjson.dumps(message), WSMsgType.TEXT)
        else:
            await self.ws.send_frame(msgpack.packb(message), WSMsgType.BINARY)

    async def send_raw(self, frame: bytes) -> None:
        """Send a frame of the connection's own type with any content."""
        await self.ws.send_frame(frame, WSMsgType.TEXT if self.is_json else WSMsgType.BINARY)

    async def receive(self) -> dict[str, Any]:
        frame = await self.ws.receive()
        if self.is_json:
            assert frame.type is WSMsgType.TEXT, frame
            return orjson.loads(frame.data)
        assert frame.type is WSMsgType.BINARY, frame
        return msgpack.unpackb(frame.data)

    async def receive_close(self) -> int:
        """Read to the end of the connection and return its close code."""
        while True:
            frame = await self.ws.receive()
            if frame.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                assert frame.type in (WSMsgType.CLOSE, WSMsgType.CLOSED), frame
                return self.ws.close_code or 0

    async def answer(self, stream_id: str) -> tuple[str, dict[str, Any]]:
        """Read one stream to its end; return its text and its last message."""
        text = ""
        while True:
            message = await self.receive()
            if message.get("id") != stream_id:
                continue
            if message["type"] == "delta":
                text += message["text"]
            elif message["type"] in ("done", "error"):
                return text, message


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running test server."""

    client: TestClient
    engine: FakeEngine
    app: web.Application

    @asynccontextmanager
    async def connect(self, encoding: str = "json", **options: Any) -> AsyncIterator[RawStream]:
        """Open a connection and take its hello."""
        async with self.client.ws_connect(
            "/v1/stream", protocols=[f"headrace.v1.{encoding}"], **options
        ) as ws:
            stream = RawStream(ws, encoding)
            assert (await stream.receive())["type"] == "hello"
            yield stream

    @property
    def base_url(self) -> str:
        return str(self.client.make_url("/"))


@asynccontextmanager
async def serve_streams(
    engine: FakeEngine | None = None,
    *,
    handler_cancellation: bool = True,
    port: int = 0,
    **config: Any,
) -> AsyncIterator[Gateway]:
    """Serve a FakeEngine, by default on a free port; leave no stream, no request and no task."""
    tasks_before = asyncio.all_tasks()
    engine = engine or FakeEngine()
    config = {"served_model_names": (MODEL,), **config}
    app = make_app(engine, GatewayConfig(**config))
    server = TestServer(app, port=port or None, handler_cancellation=handler_cancellation)
    async with TestClient(server) as client:
        yield Gateway(client, engine, app)
    assert app[STREAM_CONNECTIONS] == set()
    assert engine.num_active == 0
    for _ in range(10):  # cancelled tasks need turns of the loop to end
        await asyncio.sleep(0)
    assert asyncio.all_tasks() - {asyncio.current_task()} <= tasks_before


async def until(condition):
    """Give the event loop turns until the condition holds; the test's own time limit ends it."""
    while not condition():
        await asyncio.sleep(0)


def start(stream_id: str, prompt: str = "Hi!", **request: Any) -> dict[str, Any]:
    request = {"prompt": prompt, "max_tokens": 4, **request}
    return {"type": "start", "id": stream_id, "request": request}
