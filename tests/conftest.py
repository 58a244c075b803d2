"""Fixtures that several packages' tests share."""

import io
import json
import os
import signal
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import aiohttp
import hypothesis
import pytest

from fakes import ByteChatTemplate, ByteTokenizer, FakeEngine, byte_tokenizer
from gateway.config import GatewayConfig
from gateway.generation import TextGenerator
from gateway.key_ring import KeyRing
from gateway.metrics import Metrics
from gateway.server import Server

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("headrace", deadline=None)
hypothesis.settings.load_profile("headrace")

# What a shell starts in the background ignores this signal, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Among several processes, files that compile for GPUs or run the real model come first.

    They take longest: at the end, one process would have them while the others have nothing left.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        marks = ("gpu_tools", "model")
        long = {item.path for item in items if any(map(item.get_closest_marker, marks))}
        items.sort(key=lambda item: item.path not in long)


@dataclass(frozen=True, kw_only=True)
class RunningGateway:
    """A gateway on a real socket, with the server settings of production, over a fake engine."""

    engine: FakeEngine
    tokenizer: ByteTokenizer
    config: GatewayConfig
    metrics: Metrics
    server: Server
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return self.server.url

    async def post(self, path: str, body: object) -> tuple[int, dict]:
        """POST a JSON body; return the status and the JSON of the answer."""
        data = io.BytesIO(json.dumps(body).encode())  # aiohttp warns of large bytes
        headers = {"Content-Type": "application/json"}
        async with self.session.post(path, data=data, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, dict]:
        async with self.session.get(path) as response:
            return response.status, await response.json()


@pytest.fixture
def make_generator():
    generators = []

    def make(engine=None, words=(), **config):
        engine = engine or FakeEngine(vocab_size=259 + len(words))
        generator = TextGenerator(
            engine,
            byte_tokenizer(*words),
            ByteChatTemplate(),
            config=GatewayConfig(**config),
            metrics=Metrics("m"),
            clock=engine.clock,
        )
        generators.append(generator)
        return generator

    yield make
    for generator in generators:
        generator.close()


type StartGateway = Callable[..., Awaitable[RunningGateway]]


@pytest.fixture
async def start_gateway() -> AsyncIterator[StartGateway]:
    """Start gateways; ``await start_gateway(engine, max_n=2)`` sets fields of GatewayConfig."""
    async with AsyncExitStack() as stack:

        async def start(
            engine: FakeEngine | None = None,
            *,
            tokenizer: ByteTokenizer | None = None,
            chat_template: object = ByteChatTemplate(),
            keys: KeyRing | None = None,
            tls: ssl.SSLContext | None = None,
            **settings: object,
        ) -> RunningGateway:
            engine = engine or FakeEngine()
            tokenizer = tokenizer or byte_tokenizer()
            config = GatewayConfig(
                **{"port": 0, "served_model_names": ("tiny",), "shutdown_timeout_s": 0, **settings}
            )
            metrics = Metrics(config.model_name, prefix=config.metrics_prefix)
            generator = TextGenerator(
                engine,
                tokenizer,
                chat_template,
                config=config,
                metrics=metrics,
                clock=engine.clock,
            )
            server = await stack.enter_async_context(
                Server(config, generator, metrics, keys=keys, tls=tls)
            )
            session = await stack.enter_async_context(aiohttp.ClientSession(server.url))
            return RunningGateway(
                engine=engine,
                tokenizer=tokenizer,
                config=config,
                metrics=metrics,
                server=server,
                session=session,
            )

        yield start


@pytest.fixture
async def gateway(start_gateway: StartGateway) -> RunningGateway:
    """A gateway with default settings."""
    return await start_gateway()
