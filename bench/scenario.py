"""Requests planned one by one, sent to one server, and what the server's engine did meanwhile."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.load import run_closed_loop, run_open_loop
from bench.scrape import EngineCounters, parse_counters
from bench.stream import RequestFailed, RequestRecord
from bench.summary import LoadLevel, LoadSummary, summarize
from bench.target import Target, get_text, make_body, send
from bench.workload import Prompt, PromptKind, WorkloadConfig, make_prompt

__all__ = ["PlannedRequest", "ScenarioRun", "Sender", "plan_prompts"]

IDLE_POLL_S = 0.05
LOWEST_TOKEN_ID = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRequest:
    """One request, before it is sent.

    Attributes:
        arrival_s: in an open loop, seconds after the start.
        tenant: on whose behalf; None says nothing.
    """

    prompt: Prompt
    output_len: int
    arrival_s: float = 0.0
    tenant: str | None = None


def plan_prompts(
    input_lens: Iterable[int],
    *,
    seed: int,
    vocab_size: int,
    first_index: int = 0,
    shared_prefix_len: int = 0,
    kind: PromptKind = "tokens",
) -> list[Prompt]:
    """Prompts of token ids, or of words.

    Args:
        input_lens: their lengths.
        seed: another one gives other prompts.
        vocab_size: ids are below it, and not among the lowest, which are special.
        first_index: number of the first prompt; other numbers give other prompts.
        shared_prefix_len: how many of their first tokens are the same in all of them.
        kind: "text" is for servers that take no ids; a length is then in words.
    """
    return [
        make_prompt(
            WorkloadConfig(
                kind=kind,
                input_len=input_len,
                shared_prefix_len=shared_prefix_len,
                min_token_id=min(LOWEST_TOKEN_ID, vocab_size // 2),
                vocab_size=vocab_size,
                seed=seed,
            ),
            first_index + offset,
        )
        for offset, input_len in enumerate(input_lens)
    ]


@dataclass(frozen=True, slots=True)
class ScenarioRun:
    """A scenario, carried out.

    Attributes:
        counters: what the engine counted from just before it to just after.
    """

    summary: LoadSummary
    counters: EngineCounters
    records: list[RequestRecord]

    @property
    def busy_share(self) -> float:
        """Share of the time during which the engine had a step in flight."""
        return self.counters.busy_s / self.summary.duration_s


@dataclass(frozen=True, slots=True)
class Sender:
    """Sends planned requests to one server.

    Attributes:
        model_info: what the server lists for its model.
        clock: of the records.
        fields: that the body of every request has besides.
    """

    session: aiohttp.ClientSession
    target: Target
    model_info: dict[str, object] = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter
    fields: Mapping[str, Any] = field(default_factory=dict)

    async def send(self, planned: PlannedRequest, record: RequestRecord) -> None:
        """Send one request and fill its record; an answer of another length has failed."""
        tenant = {} if planned.tenant is None else {"tenant": planned.tenant}
        extra = {**self.fields, **tenant}
        body = make_body(self.target, planned.prompt, planned.output_len, extra)
        await send(self.session, self.target, body, record, self.clock)
        if record.error is None and record.output_tokens != planned.output_len:
            record.error = "wrong length"
            record.error_detail = (
                f"{record.output_tokens} tokens instead of {planned.output_len} "
                f"(finish_reason {record.finish_reason})"
            )

    async def send_all(
        self, planned: Sequence[PlannedRequest], concurrency: int | None = None
    ) -> list[RequestRecord]:
        """Send every request, `concurrency` at a time or each when it is due.

        A record's index is the position in `planned`.
        """

        async def send_one(record: RequestRecord) -> None:
            await self.send(planned[record.index], record)

        indices = range(len(planned))
        if concurrency is not None:
            return await run_closed_loop(send_one, indices, concurrency, clock=self.clock)
        arrivals_s = [request.arrival_s for request in planned]
        return await run_open_loop(send_one, indices, arrivals_s, clock=self.clock)

    async def warm_up(self, planned: Sequence[PlannedRequest]) -> None:
        """Send requests all at once and forget them.

        Raises:
            RequestFailed: one of them failed; then nothing that follows would work either.
        """
        for record in await self.send_all(planned, len(planned)):
            if record.error is not None:
                raise RequestFailed(record.error, f"in the warm-up: {record.error_detail}")

    async def measure(self, planned: Sequence[PlannedRequest], level: LoadLevel) -> ScenarioRun:
        """Send every request under a load, and read the engine's counters before and after."""
        before = await self.read_counters()
        cpu_start_s = time.process_time()
        records = await self.send_all(planned, level.concurrency)
        cpu_s = time.process_time() - cpu_start_s
        counters = (await self.read_counters()).since(before)
        summary = summarize(level, records, output_len=None, client_cpu_s=cpu_s)
        return ScenarioRun(summary, counters, records)

    @asynccontextmanager
    async def kept_busy(
        self, plan: Callable[[int], PlannedRequest], concurrency: int
    ) -> AsyncIterator[list[RequestRecord]]:
        """Keep so many requests in flight for as long as the block runs, then leave them.

        Args:
            plan: makes the request of a number; called once for each, from 0 on.
            concurrency: a request that ends is replaced at once.

        Yields:
            The records, in order of sending; more come while the block runs.
        """
        records: list[RequestRecord] = []

        async def send_one(record: RequestRecord) -> None:
            records.append(record)
            await self.send(plan(record.index), record)

        load = asyncio.ensure_future(
            run_closed_loop(send_one, itertools.count(), concurrency, clock=self.clock)
        )
        try:
            yield records
        finally:
            load.cancel()
            await asyncio.wait({load})
        if not load.cancelled():
            load.result()  # it never returns, so this is an error of ours

    async def read_counters(self) -> EngineCounters:
        """The engine's counters now."""
        return parse_counters(await get_text(self.session, self.target.url, "metrics"))

    async def wait_until_idle(
        self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """Wait until no request runs or waits, for instance after streams were left."""
        while (await self.read_counters()).num_unfinished:
            await sleep(IDLE_POLL_S)
