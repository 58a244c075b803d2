"""The rounds of `headrace bench peers`: sides are started, warmed, measured, stopped, in turn."""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Protocol

import orjson
from rich.console import Console

from bench.comparison.figures import ProductLimit, SideRun, WorkloadRun
from bench.comparison.golden import GoldenCase, GoldenResult, check_golden
from bench.comparison.memory import peak_memory_bytes
from bench.comparison.offline import OfflinePipeline, running_pipeline
from bench.comparison.plan import PeersPlan, Workload
from bench.comparison.sides import Side
from bench.interference import disturb
from bench.scenario import PlannedRequest, Sender
from bench.server_process import ServerFailed, ServerProcess, running_peer, running_server
from bench.stream import RequestFailed, RequestRecord
from bench.summary import Distribution, LoadLevel, summarize
from bench.target import Target, find_model, open_session
from gateway.event_loop import loop_factory

__all__ = ["PeersRunner", "measure_limit"]

LAST_WORDS = 1500  # characters
LEFT_S = 1.0  # after streams were left, so that the server has noticed


class Requester(Protocol):
    """Sends planned requests: a Sender, or an OfflinePipeline."""

    async def send_all(
        self, planned: Sequence[PlannedRequest], concurrency: int | None = None
    ) -> list[RequestRecord]:
        """Send every request, `concurrency` at a time or each when it is due."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PeersRunner:
    """Measures sides.

    Attributes:
        plan: what is sent.
        cases: golden answers that ours must give; none are not checked.
        folder: for what the sides compile, so that the first start of each is cold; None leaves
            them their own folders.
        timeout_s: of silence, after which a request has failed.
        progress: for a line of progress per workload.
    """

    plan: PeersPlan
    cases: Sequence[GoldenCase]
    folder: Path | None
    startup_timeout_s: float
    timeout_s: float
    progress: Console

    def measure_round(self, sides: Sequence[Side], round_number: int) -> list[SideRun]:
        """Every side once, one at a time; the order is the reverse of the last round's."""
        in_order = sides if round_number % 2 == 0 else reversed(sides)
        return [self.measure_side(side, round_number) for side in in_order]

    def measure_side(self, side: Side, round_number: int) -> SideRun:
        """One side in one round; a failure is a part of the result."""
        self.tell(f"round {round_number + 1}: starting {side.name}")
        run = SideRun(
            side=side.name,
            round_number=round_number,
            is_cold=self.folder is not None and round_number == 0,
        )
        with tempfile.TemporaryFile("w+") as output:
            try:
                with self.running(side, output) as running:
                    run = replace(run, ready_s=running.ready_s)
                    self.tell(f"  ready after {running.ready_s:.1f} s")
                    workloads, golden = asyncio.run(
                        self.work(side, running, round_number), loop_factory=loop_factory()
                    )
                    run = replace(
                        run,
                        workloads=workloads,
                        golden=golden,
                        peak_memory_bytes=peak_memory_bytes(running.pid),
                    )
            except (ServerFailed, RequestFailed) as error:
                run = replace(run, failure=str(error))
            if run.failure or any(entry.failure for entry in run.workloads):
                output.seek(0)
                run = replace(run, last_words=output.read()[-LAST_WORDS:])
        return run

    @contextmanager
    def running(self, side: Side, output: IO[str]) -> Iterator[ServerProcess | OfflinePipeline]:
        """A side, from its start to its end."""
        cold = {} if self.folder is None else side.cold_environment(self.folder / side.name)
        environment = {**side.environment, **cold}
        if side.kind == "headrace":
            with running_server(
                side.command,
                startup_timeout_s=self.startup_timeout_s,
                output=output,
                environment=environment,
            ) as server:
                yield server
        elif side.kind == "server":
            with running_peer(
                side.command,
                ready_path=side.ready_path,
                startup_timeout_s=self.startup_timeout_s,
                output=output,
                environment=environment,
            ) as server:
                yield server
        else:
            with running_pipeline(
                side.command,
                startup_timeout_s=self.startup_timeout_s,
                timeout_s=self.timeout_s,
                output=output,
                environment=environment,
            ) as pipeline:
                yield pipeline

    async def work(
        self, side: Side, running: ServerProcess | OfflinePipeline, round_number: int
    ) -> tuple[list[WorkloadRun], GoldenResult | None]:
        """Warm a side up, and measure all workloads that it can bear."""
        golden = None
        async with self.requester(side, running) as requester:
            await warm_up(requester, self.plan.warm_up(side.prompts))
            if isinstance(requester, Sender) and side.kind == "headrace" and self.cases:
                golden = await check_golden(requester, self.cases)
            runs = []
            for workload in self.plan.workloads(round_number, side.prompts):
                if workload.kind != "long-prompt":
                    runs.append(await self.measure_workload(requester, workload))
                elif isinstance(requester, Sender):  # nothing arrives in a pipeline
                    runs.append(await self.disturb(requester, workload))
        return runs, golden

    @asynccontextmanager
    async def requester(
        self, side: Side, running: ServerProcess | OfflinePipeline
    ) -> AsyncIterator[Requester]:
        """What sends requests to a side."""
        if isinstance(running, OfflinePipeline):
            yield running
            return
        async with open_session(None, self.timeout_s, reuse=False) as session:
            model = side.model or (await find_model(session, running.url))["id"]
            target = Target(
                url=running.url,
                model=model,
                ignore_eos=side.ignore_eos,
                continuous_usage=side.ignore_eos,
            )
            yield Sender(session, target, fields=side.body)

    async def measure_workload(self, requester: Requester, workload: Workload) -> WorkloadRun:
        """Send the requests of a workload."""
        cpu_start_s = time.process_time()
        try:
            records = await requester.send_all(workload.requests, workload.concurrency)
        except RequestFailed as error:
            return self.failed(workload, error)
        summary = summarize(
            LoadLevel(concurrency=workload.concurrency),
            records,
            output_len=None,
            client_cpu_s=time.process_time() - cpu_start_s,
        )
        self.tell(
            f"  {workload.name}: {summary.output_tokens_per_s:.1f} output tokens/s, "
            f"{summary.num_requests - summary.num_failed} of {summary.num_requests} requests, "
            f"{summary.duration_s:.1f} s"
        )
        return WorkloadRun(workload=workload.name, summary=summary)

    async def disturb(self, sender: Sender, workload: Workload) -> WorkloadRun:
        """Let streams run, and send a long prompt."""
        *streams, long_prompt = workload.requests
        try:
            idle_s = self.plan.idle_s
            disturbance, record = await disturb(
                sender, streams, long_prompt, idle_s, after_s=idle_s / 10
            )
        except RequestFailed as error:
            return self.failed(workload, error)
        await asyncio.sleep(LEFT_S)
        beside_ms = Distribution.of_seconds(disturbance.gaps_s)
        summary = summarize(LoadLevel(concurrency=1), [record], output_len=None, client_cpu_s=0.0)
        self.tell(f"  {workload.name}: {disturbance.prefill_s:.2f} s")
        return WorkloadRun(workload=workload.name, summary=summary, beside_ms=beside_ms)

    def failed(self, workload: Workload, error: RequestFailed) -> WorkloadRun:
        """A workload that came to nothing."""
        self.tell(f"  {workload.name}: {error}")
        return WorkloadRun(workload=workload.name, failure=str(error))

    def tell(self, text: str) -> None:
        """A line of progress."""
        self.progress.print(text, markup=False)


async def warm_up(requester: Requester, planned: Sequence[PlannedRequest]) -> None:
    """Send requests at once and forget them.

    Raises:
        RequestFailed: one failed; then nothing that follows would work either.
    """
    for record in await requester.send_all(planned, len(planned)):
        if record.error is not None:
            raise RequestFailed(record.error, f"in the warm-up: {record.error_detail}")


def measure_limit(model: Path) -> ProductLimit:
    """Measure products in a process of their own.

    Raises:
        ServerFailed: it failed.
    """
    command = [sys.executable, "-m", "bench.comparison.limit", str(model)]
    try:
        answer = subprocess.run(command, capture_output=True, check=True)
    except subprocess.CalledProcessError as error:
        words = error.stderr[-LAST_WORDS:].decode(errors="replace")
        raise ServerFailed(f"the product rates cannot be measured: {words}") from error
    return ProductLimit(**orjson.loads(answer.stdout))
