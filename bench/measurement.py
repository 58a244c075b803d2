"""A measurement: a plan of load levels, carried out, and its result as one JSON document."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from bench.environment import describe_environment
from bench.load import run_closed_loop, run_open_loop
from bench.report import record_row
from bench.stream import RequestRecord
from bench.summary import Goodput, LoadLevel, LoadSummary, summarize
from bench.target import Target, describe_server, find_model, make_body, open_session, send
from bench.workload import WorkloadConfig, arrival_times, make_prompt

__all__ = ["BenchPlan", "LevelResult", "make_document", "measure"]

RESULT_SCHEMA = "headrace.bench.serve/1"
OPEN_LOOP_WARMUPS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchPlan:
    """A whole measurement.

    Attributes:
        target: the server; an empty model name means the first that it lists.
        levels: loads, measured one after the other.
        num_prompts: requests per level; None takes four rounds of a closed loop's concurrency, at
            least 16, and 64 for an open loop.
        num_warmups: requests before each level that are not counted; None takes one for each
            stream of a closed loop.
        timeout_s: how long the server may be silent within one request.
    """

    target: Target
    workload: WorkloadConfig
    levels: tuple[LoadLevel, ...]
    num_prompts: int | None = None
    num_warmups: int | None = None
    timeout_s: float = 600.0
    goodput: Goodput | None = None

    def prompts_of(self, level: LoadLevel) -> int:
        """How many requests a level takes."""
        if self.num_prompts is not None:
            return self.num_prompts
        return 64 if level.concurrency is None else max(16, 4 * level.concurrency)

    def warmups_of(self, level: LoadLevel) -> int:
        """How many requests go before it."""
        if self.num_warmups is not None:
            return self.num_warmups
        return OPEN_LOOP_WARMUPS if level.concurrency is None else level.concurrency


@dataclass(frozen=True, slots=True)
class LevelResult:
    """One level, measured."""

    summary: LoadSummary
    records: list[RequestRecord]


async def measure(
    plan: BenchPlan, console: Console
) -> tuple[BenchPlan, dict[str, Any], list[LevelResult]]:
    """Measure every level of a plan.

    Args:
        plan: what to measure.
        console: for a line of progress per level.

    Returns:
        The plan with the model's name filled in, what the server says of itself, and the results.

    Raises:
        RequestFailed: the server cannot be reached, or lists no model.
    """
    results: list[LevelResult] = []
    prompt_numbers = itertools.count()  # over all levels: no prompt is ever sent twice
    async with open_session(plan.target.api_key, plan.timeout_s) as session:
        model = await find_model(session, plan.target.url) if not plan.target.model else {}
        if model:
            plan = replace(plan, target=replace(plan.target, model=model["id"]))
        server = {"model": model, "version": await describe_server(session, plan.target.url)}

        async def send_one(record: RequestRecord) -> None:
            prompt = make_prompt(plan.workload, record.index)
            body = make_body(plan.target, prompt, plan.workload.output_len)
            await send(session, plan.target, body, record, time.perf_counter)

        async def run(level: LoadLevel, indices: Sequence[int]) -> list[RequestRecord]:
            if level.request_rate is None:
                return await run_closed_loop(send_one, indices, level.concurrency or 1)
            arrivals_s = arrival_times(level.request_rate, level.burstiness, plan.workload.seed)
            return await run_open_loop(send_one, indices, arrivals_s)

        for level in plan.levels:
            num_warmups, num_prompts = plan.warmups_of(level), plan.prompts_of(level)
            console.print(
                f"{level.name}: {num_warmups} warm-up requests, then {num_prompts}",
                highlight=False,
            )
            await run_closed_loop(
                send_one, take(prompt_numbers, num_warmups), level.concurrency or num_warmups
            )
            cpu_start_s = time.process_time()
            records = await run(level, take(prompt_numbers, num_prompts))
            summary = summarize(
                level,
                records,
                output_len=plan.workload.output_len,
                client_cpu_s=time.process_time() - cpu_start_s,
                goodput=plan.goodput,
            )
            results.append(LevelResult(summary, records))
    return plan, server, results


def take(numbers: Iterator[int], count: int) -> list[int]:
    """The next numbers."""
    return list(itertools.islice(numbers, count))


def make_document(
    plan: BenchPlan,
    server: dict[str, Any],
    results: Sequence[LevelResult],
    arguments: Sequence[str],
    *,
    with_requests: bool,
) -> dict[str, Any]:
    """The result as JSON. The API key stays out."""
    target = asdict(plan.target)
    del target["api_key"]
    runs = []
    for result in results:
        run = result.summary.as_dict()
        if with_requests:
            run["requests"] = [record_row(record) for record in result.records]
        runs.append(run)
    return {
        "schema": RESULT_SCHEMA,
        "environment": describe_environment(arguments),
        "target": target,
        "server": server,
        "workload": asdict(plan.workload),
        "goodput": None if plan.goodput is None else asdict(plan.goodput),
        "runs": runs,
    }
