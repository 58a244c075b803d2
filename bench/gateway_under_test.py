"""A gateway over some engine, loaded by clients in processes of their own.

It runs as `headrace serve` runs it, on an event loop beside the engine's thread.
"""

import asyncio
import gc
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import IO, Any, Self

import orjson
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from bench.carrier_load import Carrier
from gateway.config import GatewayConfig
from gateway.event_loop import loop_factory, settle_garbage_collector
from gateway.generation import TextGenerator
from gateway.metrics import Metrics
from gateway.server import Server
from gateway.tokenizer import Tokenizer
from gateway.tokenizer_files import TokenizerFiles
from jaxengine.async_engine import AsyncEngine

__all__ = ["CONFIG", "GatewayFailed", "GatewayUnderTest", "random_tokenizer"]

MAX_CLIENTS = 4
CLIENT_TIMEOUT_S = 180.0
CONFIG = GatewayConfig(port=0, served_model_names=("random",), shutdown_timeout_s=0)
POLL_S = 0.05
WARM_TOKENS = 4  # of each stream, before its cost counts


class GatewayFailed(Exception):
    """A client ended with an error."""


class GatewayUnderTest:
    """A listening gateway over a warm engine, while the block runs.

    Args:
        make_engine: called on the event loop; returns the engine, not started.
        vocab_size: of the engine.
        config: of the gateway; its port is free to choose.
        new_loop: makes the event loop; None takes that of `headrace serve`.
    """

    def __init__(
        self,
        make_engine: Callable[[], AsyncEngine],
        vocab_size: int,
        *,
        config: GatewayConfig = CONFIG,
        new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
    ) -> None:
        self._make_engine = make_engine
        self._vocab_size = vocab_size
        self._config = config
        self._loop = asyncio.Runner(loop_factory=new_loop or loop_factory())
        self._num_measured = 0
        self._gc_threshold = gc.get_threshold()

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
        gc.set_threshold(*self._gc_threshold)
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
        config = self._config
        metrics = Metrics(config.model_name)
        self._engine = self._make_engine()
        tokenizer = random_tokenizer(self._vocab_size)
        generator = TextGenerator(self._engine, tokenizer, None, config=config, metrics=metrics)
        self._server = Server(config, generator, metrics)
        await self._server.start()
        self._engine.start()
        settle_garbage_collector()

    async def _measure(
        self, carrier: Carrier, num_streams: int, prompt_len: int, output_len: int
    ) -> dict[str, Any]:
        num_clients = min(num_streams, MAX_CLIENTS, max(1, (os.cpu_count() or 1) // 2))
        shares = [num_streams // num_clients] * num_clients
        for index in range(num_streams % num_clients):
            shares[index] += 1
        clients = [
            self._client(carrier, share, prompt_len, output_len, index)
            for index, share in enumerate(shares)
        ]
        cost = _LoopCost(self._engine, num_streams)
        try:
            async with asyncio.timeout(CLIENT_TIMEOUT_S):
                for client in clients:
                    if await asyncio.to_thread(_output(client).readline) != b"ready\n":
                        raise GatewayFailed(_last_words(client.communicate()[1]))
                before = self._engine.stats()
                with cost.measured():
                    found = await asyncio.gather(
                        *(asyncio.to_thread(_finish, client) for client in clients)
                    )
        finally:
            for client in clients:
                client.kill()
                client.communicate()
        busy_s = self._engine.stats().step_busy_s - before.step_busy_s
        seconds = max(c["end_s"] for c in found) - min(c["start_s"] for c in found)
        output_tokens = sum(c["output_tokens"] for c in found)
        return {
            "seconds": seconds,
            "output_tokens_per_s": output_tokens / seconds,
            "tokens_per_message": output_tokens / max(1, sum(c["messages"] for c in found)),
            "engine_busy_share": busy_s / seconds,
            **cost.figures(),
            "clients": num_clients,
            "busiest_client_share": max(c["cpu_s"] for c in found) / seconds,
        }

    def _client(
        self, carrier: Carrier, num_streams: int, prompt_len: int, output_len: int, index: int
    ) -> subprocess.Popen[bytes]:
        numbers = (num_streams, prompt_len, output_len, self._vocab_size)
        seed = self._num_measured * MAX_CLIENTS + index
        # Not by uvloop, which would fork a process that runs JAX.
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "bench.carrier_load", carrier, self._server.url),
                *map(str, (*numbers, seed)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )


class _LoopCost:
    """Processor time of this thread, the event loop's, while all streams run.

    Neither the engine's thread nor starts and ends of requests are in it.
    """

    def __init__(self, engine: AsyncEngine, num_streams: int) -> None:
        self._engine = engine
        self._num_streams = num_streams
        self._samples: list[tuple[int, float, float]] = []  # tokens so far, user and system seconds

    @contextmanager
    def measured(self) -> Iterator[None]:
        watch = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watch.cancel()

    def figures(self) -> dict[str, float | None]:
        """Return microseconds a token; None if the streams did not run together for long."""
        if len(self._samples) < 2 or self._samples[0][0] == self._samples[-1][0]:
            return {"loop_us_per_token": None, "loop_system_us_per_token": None}
        (tokens, user_s, system_s), last = self._samples[0], self._samples[-1]
        num_tokens = last[0] - tokens
        user_us = (last[1] - user_s) / num_tokens * 1e6
        system_us = (last[2] - system_s) / num_tokens * 1e6
        return {"loop_us_per_token": user_us + system_us, "loop_system_us_per_token": system_us}

    async def _watch(self) -> None:
        warm = self._engine.stats().generation_tokens + WARM_TOKENS * self._num_streams
        while True:
            await asyncio.sleep(POLL_S)
            stats = self._engine.stats()
            if stats.num_running == self._num_streams and stats.generation_tokens >= warm:
                used = resource.getrusage(resource.RUSAGE_THREAD)
                self._samples.append((stats.generation_tokens, used.ru_utime, used.ru_stime))


def _output(client: subprocess.Popen[bytes]) -> IO[bytes]:
    assert client.stdout is not None, "it was opened with a pipe"
    return client.stdout


def _finish(client: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Tell a client to begin; return what it has counted."""
    output, errors = client.communicate(b"\n")
    if client.returncode:
        raise GatewayFailed(_last_words(errors))
    counts: dict[str, Any] = orjson.loads(output)
    return counts


def _last_words(errors: bytes) -> str:
    return errors.decode(errors="replace")[-300:].strip()


def random_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a byte-level tokenizer of so many tokens: bytes, then words of four digits or so."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (f"\u0120{index:x}" for index in range(vocab_size - len(symbols)))
    vocab = {text: token_id for token_id, text in enumerate((*symbols, *words))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(TokenizerFiles(backend=backend, bos_id=None, eos_ids=(), adds_bos=False))
