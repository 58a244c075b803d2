"""Async engines over the fake device, and how to use one."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from engine_loop import small_config
from fake_runner import FakeModelRunner, weighted_sum, whole_answer
from jaxengine.async_engine import AsyncEngine
from jaxengine.config import EngineConfig
from jaxengine.engine_core import EngineCore
from jaxengine.output_stream import OutputStream
from jaxengine.outputs import RequestOutput
from jaxengine.sampling_params import SamplingParams
from jaxengine.step_time import StepTimeModel
from jaxengine.token_engine import EngineLimits, TokenRequest

__all__ = ["VOCAB_SIZE", "Start", "ask", "expected", "launches", "make_engine", "read", "starting"]

VOCAB_SIZE = 100
Start = Callable[..., tuple[AsyncEngine, FakeModelRunner]]


def make_engine(
    config: EngineConfig, runner: FakeModelRunner, *, step_times: StepTimeModel | None = None
) -> AsyncEngine:
    limits = EngineLimits(
        max_model_len=config.max_model_len,
        vocab_size=VOCAB_SIZE,
        max_num_seqs=config.max_num_seqs,
        max_num_queued_requests=config.max_num_queued_requests,
        eos_token_ids=(),
    )
    core = EngineCore(config, runner, eos_token_ids=(), step_times=step_times)
    return AsyncEngine(core, limits)


@asynccontextmanager
async def starting(*, overlap: bool) -> AsyncIterator[Start]:
    """Start engines within the block; when it ends nothing may be left in them."""
    started = []

    def start_one(
        runner_type=FakeModelRunner, step_times: StepTimeModel | None = None, **changes
    ) -> tuple[AsyncEngine, FakeModelRunner]:
        config = small_config(**({"overlap": overlap} | changes))
        runner = runner_type(config, vocab_size=VOCAB_SIZE)
        engine = make_engine(config, runner, step_times=step_times)
        engine.start()
        started.append((engine, runner))
        return engine, runner

    yield start_one
    for engine, runner in started:
        runner.release()
        await engine.stop(drain_timeout_s=0)
        assert runner.faults == []
        if engine.failure is None:
            stats = engine.stats()
            assert (stats.num_running, stats.num_waiting) == (0, 0)
            assert stats.num_free_blocks == stats.num_blocks


def ask(
    engine: AsyncEngine,
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int = 3,
    *,
    salt: str | None = None,
    tenant: str = "",
    priority: int = 0,
    queue_timeout_s: float | None = None,
    deadline_s: float | None = None,
    **params,
) -> OutputStream:
    """Submit a request; the default one is answered 14, 70, 20."""
    request = TokenRequest(
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens, **params),
        cache_salt=salt,
        tenant=tenant,
        priority=priority,
        queue_timeout_s=queue_timeout_s,
        deadline_s=deadline_s,
    )
    [stream] = engine.submit([request])
    return stream


async def read(stream: OutputStream) -> RequestOutput:
    """Read to the end; return all outputs as one."""
    outputs = [output async for output in stream]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    whole = outputs[0]
    for output in outputs[1:]:
        whole = whole.merged(output)
    return whole


def expected(prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """Return the answer computed without an engine."""
    return whole_answer(
        prompt,
        SamplingParams(max_tokens=max_tokens),
        weighted_sum(VOCAB_SIZE),
        eos_token_ids=(),
        max_model_len=10**9,
    )[0]


async def launches(runner: FakeModelRunner, count: int) -> None:
    """Wait until so many steps have been launched since the start."""
    await asyncio.to_thread(runner.wait_for_launches, count)
