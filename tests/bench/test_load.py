import asyncio

import pytest

from bench.load import run_closed_loop, run_open_loop
from bench.stream import RequestRecord


class Clock:
    """Time that moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)  # whatever is due now runs now
        self.now_s += seconds


async def test_a_closed_loop_keeps_exactly_so_many_requests_in_flight():
    in_flight = 0
    seen: list[int] = []

    async def send_one(record: RequestRecord) -> None:
        nonlocal in_flight
        in_flight += 1
        seen.append(in_flight)
        for _ in range(1 + record.index % 3):  # some take longer than others
            await asyncio.sleep(0)
        in_flight -= 1

    records = await run_closed_loop(send_one, range(20), concurrency=4)
    assert sorted(record.index for record in records) == list(range(20))
    assert max(seen) == 4
    assert set(seen[4:]) == {4}  # a worker that ends is replaced at once


async def test_a_closed_loop_with_few_prompts_sends_each_once():
    async def send_one(record: RequestRecord) -> None:
        await asyncio.sleep(0)

    records = await run_closed_loop(send_one, [7, 8], concurrency=10)
    assert [record.index for record in records] == [7, 8]


async def test_an_open_loop_sends_when_due_whatever_is_in_flight():
    clock = Clock()
    release = asyncio.Event()
    sent: list[tuple[int, float]] = []

    async def send_one(record: RequestRecord) -> None:
        sent.append((record.index, clock.now_s))
        if len(sent) == 3:
            release.set()  # nothing ends before all are under way
        await release.wait()

    records = await run_open_loop(
        send_one, [0, 1, 2], [0.0, 0.5, 2.0], clock=clock, sleep=clock.sleep
    )
    assert sent == [(0, 50.0), (1, 50.5), (2, 52.0)]
    assert [record.start_s for record in records] == [50.0, 50.5, 52.0]
    assert [record.lag_s for record in records] == [0.0, 0.0, 0.0]


async def test_a_request_that_leaves_late_starts_when_it_was_due():
    clock = Clock()

    async def oversleep(seconds: float) -> None:
        await clock.sleep(seconds + 0.25)

    async def send_one(record: RequestRecord) -> None:
        pass

    records = await run_open_loop(
        send_one, [0, 1, 2], [0.0, 1.0, 1.125], clock=clock, sleep=oversleep
    )
    assert [record.start_s for record in records] == [50.0, 51.0, 51.125]
    assert [record.lag_s for record in records] == [0.0, 0.25, 0.125]


async def test_a_bug_in_the_client_ends_the_run():
    async def send_one(record: RequestRecord) -> None:
        raise KeyError("bug")

    with pytest.raises(ExceptionGroup):
        await run_closed_loop(send_one, range(3), concurrency=2)
