"""The gateway in front of an engine under test: tokens a second through websocket and SSE.

The gateway runs as `headrace serve` runs it, on an event loop beside the engine's thread; the
clients are processes of their own.
"""

import asyncio
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self, get_args

import orjson
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from bench.carrier_load import Carrier
from bench.gpu_engine import EngineUnderTest
from gateway.config import GatewayConfig
from gateway.generation import TextGenerator
from gateway.metrics import Metrics
from gateway.server import Server
from gateway.tokenizer import Tokenizer
from gateway.tokenizer_files import TokenizerFiles

__all__ = ["GatewayFailed", "GatewayUnderTest", "measure_gateway", "random_tokenizer"]

MAX_CLIENTS = 4
CLIENT_TIMEOUT_S = 180.0


class GatewayFailed(Exception):
    """A client ended with an error."""


def measure_gateway(
    engine: EngineUnderTest, streams: Sequence[int], *, prompt_len: int, output_len: int
) -> Iterator[dict[str, Any]]:
    """Measure the engine alone and through each carrier; a row for each, as it is done.

    Args:
        engine: whose model and programs serve.
        streams: how many at the same time; one measurement for each.
        prompt_len: tokens of each prompt.
        output_len: tokens of each answer.
    """
    with GatewayUnderTest(engine) as gateway:
        for num_streams in streams:
            alone = engine.run([(prompt_len, output_len)] * num_streams)
            alone_per_s = alone.output_tokens / alone.seconds
            about = {"streams": num_streams, "tokens": f"{prompt_len}/{output_len}"}
            yield {**about, "through": "engine alone", "output_tokens_per_s": alone_per_s}
            for carrier in get_args(Carrier):
                figures = gateway.measure(carrier, num_streams, prompt_len, output_len)
                share = figures["output_tokens_per_s"] / alone_per_s
                yield {**about, "through": carrier, **figures, "share_of_engine": share}


class GatewayUnderTest:
    """A listening gateway over a warm engine, while the block runs."""

    def __init__(self, engine: EngineUnderTest) -> None:
        self._engine = engine
        self._vocab_size = engine.model.vocab_size
        self._loop = asyncio.Runner()
        self._num_measured = 0

    def __enter__(self) -> Self:
        self._loop.run(self._start())
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        gc.unfreeze()
        self._loop.run(self._server.stop())
        self._loop.close()

    def measure(
        self, carrier: Carrier, num_streams: int, prompt_len: int, output_len: int
    ) -> dict[str, Any]:
        """Let clients read so many streams at once.

        Raises:
            GatewayFailed: one of them could not.
        """
        self._num_measured += 1  # other prompts every time
        return self._loop.run(self._measure(carrier, num_streams, prompt_len, output_len))

    async def _start(self) -> None:
        config = GatewayConfig(port=0, served_model_names=("random",), shutdown_timeout_s=0)
        metrics = Metrics(config.model_name)
        self._async_engine = self._engine.serving()
        tokenizer = random_tokenizer(self._vocab_size)
        generator = TextGenerator(
            self._async_engine, tokenizer, None, config=config, metrics=metrics
        )
        self._server = Server(config, generator, metrics)
        await self._server.start()
        self._async_engine.start()
        gc.collect()
        gc.freeze()  # as when serving

    async def _measure(
        self, carrier: Carrier, num_streams: int, prompt_len: int, output_len: int
    ) -> dict[str, Any]:
        num_clients = min(num_streams, MAX_CLIENTS, max(1, (os.cpu_count() or 1) // 2))
        shares = [num_streams // num_clients] * num_clients
        for index in range(num_streams % num_clients):
            shares[index] += 1
        clients = [
            await self._client(carrier, share, prompt_len, output_len, index)
            for index, share in enumerate(shares)
        ]
        try:
            async with asyncio.timeout(CLIENT_TIMEOUT_S):
                for client in clients:
                    if await _output(client).readline() != b"ready\n":
                        raise GatewayFailed(await _last_words(client))
                before = self._async_engine.stats()
                found = await asyncio.gather(*(_finish(client) for client in clients))
        finally:
            for client in clients:
                if client.returncode is None:
                    client.kill()
                await client.wait()
        busy_s = self._async_engine.stats().step_busy_s - before.step_busy_s
        seconds = max(c["end_s"] for c in found) - min(c["start_s"] for c in found)
        output_tokens = sum(c["output_tokens"] for c in found)
        return {
            "seconds": seconds,
            "output_tokens_per_s": output_tokens / seconds,
            "tokens_per_message": output_tokens / max(1, sum(c["messages"] for c in found)),
            "engine_busy_share": busy_s / seconds,
            "clients": num_clients,
            "busiest_client_share": max(c["cpu_s"] for c in found) / seconds,
        }

    async def _client(
        self, carrier: Carrier, num_streams: int, prompt_len: int, output_len: int, index: int
    ) -> asyncio.subprocess.Process:
        numbers = (num_streams, prompt_len, output_len, self._vocab_size)
        seed = self._num_measured * MAX_CLIENTS + index
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.carrier_load", carrier, self._server.url),
            *map(str, (*numbers, seed)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )


def _output(client: asyncio.subprocess.Process) -> asyncio.StreamReader:
    assert client.stdout is not None, "it was opened with a pipe"
    return client.stdout


async def _finish(client: asyncio.subprocess.Process) -> dict[str, Any]:
    """Tell a client to begin; return what it has counted."""
    output, errors = await client.communicate(b"\n")
    if client.returncode:
        raise GatewayFailed(errors.decode(errors="replace")[-300:].strip())
    counts: dict[str, Any] = orjson.loads(output)
    return counts


async def _last_words(client: asyncio.subprocess.Process) -> str:
    _, errors = await client.communicate()
    return errors.decode(errors="replace")[-300:].strip()


def random_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a byte-level tokenizer of so many tokens: bytes, then words of four digits or so."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (f"\u0120{index:x}" for index in range(vocab_size - len(symbols)))
    vocab = {text: token_id for token_id, text in enumerate((*symbols, *words))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(TokenizerFiles(backend=backend, bos_id=None, eos_ids=(), adds_bos=False))
