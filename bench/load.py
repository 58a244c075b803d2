"""Two ways to load a server: so many requests at any time, or so many arrivals a second."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from bench.stream import RequestRecord

__all__ = ["SendOne", "run_closed_loop", "run_open_loop"]

# Sends the request of a record, fills the record, and never raises for a failure of the server.
type SendOne = Callable[[RequestRecord], Awaitable[None]]


async def run_closed_loop(
    send_one: SendOne,
    indices: Iterable[int],
    concurrency: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[RequestRecord]:
    """Keep `concurrency` requests in flight until each prompt was sent once.

    Args:
        send_one: sends one request.
        indices: numbers of the prompts.
        concurrency: each of so many workers sends its next request when its last one has ended.
        clock: seconds.

    Returns:
        The records, in order of sending.
    """
    records: list[RequestRecord] = []
    waiting = iter(indices)

    async def work() -> None:
        for index in waiting:
            record = RequestRecord(index, clock())
            records.append(record)
            await send_one(record)

    async with asyncio.TaskGroup() as workers:
        for _ in range(concurrency):
            workers.create_task(work())
    return records


async def run_open_loop(
    send_one: SendOne,
    indices: Sequence[int],
    arrivals_s: Iterable[float],
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[RequestRecord]:
    """Send each prompt at its time, whatever is still in flight.

    The time of a request starts when it was due, not when the client came to send it: a client that
    falls behind must not make the server look fast.

    Args:
        send_one: sends one request.
        indices: numbers of the prompts.
        arrivals_s: when each is due, in seconds after the start, rising.
        clock: seconds.
        sleep: waits so many seconds.

    Returns:
        The records, in order of sending.
    """
    records: list[RequestRecord] = []
    start = clock()
    async with asyncio.TaskGroup() as requests:
        for index, arrival_s in zip(indices, arrivals_s, strict=False):
            due = start + arrival_s
            if (wait_s := due - clock()) > 0:
                await sleep(wait_s)
            record = RequestRecord(index, due, lag_s=max(0.0, clock() - due))
            records.append(record)
            requests.create_task(forward(send_one, record))
    return records


async def forward(send_one: SendOne, record: RequestRecord) -> None:
    """A coroutine for TaskGroup, which takes no other awaitable."""
    await send_one(record)
