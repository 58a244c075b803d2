import asyncio
from collections.abc import AsyncIterator

import pytest

from bench.scenario import PlannedRequest, Sender, plan_prompts
from bench.stream import RequestFailed, RequestRecord
from bench.summary import LoadLevel
from bench.target import Target, open_session
from bench_server import FakeServe


@pytest.fixture
async def sender() -> AsyncIterator[Sender]:
    with FakeServe().run(["headrace", "serve"], output=None) as server:
        async with open_session(None, 30) as session:
            yield Sender(session, Target(url=server.url, model="tiny"))


def request(output_len: int = 2, **fields: object) -> PlannedRequest:
    return PlannedRequest(prompt=[5, 6, 7], output_len=output_len, **fields)


def test_prompts_have_their_lengths_and_repeat_with_seed_and_number():
    prompts = plan_prompts([4, 9], seed=1, vocab_size=5000)
    assert [len(prompt) for prompt in prompts] == [4, 9]
    assert plan_prompts([4, 9], seed=1, vocab_size=5000) == prompts
    assert plan_prompts([9], seed=1, vocab_size=5000, first_index=1) == prompts[1:]
    assert plan_prompts([4, 9], seed=2, vocab_size=5000) != prompts


def test_prompts_have_ordinary_ids_of_the_vocabulary():
    (prompt,) = plan_prompts([500], seed=1, vocab_size=40)
    assert set(prompt) == set(range(20, 40))
    (prompt,) = plan_prompts([500], seed=1, vocab_size=1002)
    assert set(prompt) <= set(range(501, 1002))


def test_prompts_can_begin_alike():
    first, second = plan_prompts([8, 8], seed=1, vocab_size=5000, shared_prefix_len=6)
    assert first[:6] == second[:6]
    assert first[6:] != second[6:]


async def test_a_plan_is_carried_out_and_the_counters_of_its_time_are_read(sender: Sender):
    await sender.send_all([request()])  # counted before the measurement
    run = await sender.measure([request(2), request(4)], LoadLevel(concurrency=2))
    assert run.summary.output_tokens == 6
    assert [record.index for record in run.records] == [0, 1]
    assert run.counters.steps == 6
    assert run.busy_share == pytest.approx(0.006 / run.summary.duration_s)
    assert run.counters.wasted_shares() == {"finished_row": 0.25}


async def test_an_open_loop_sends_each_request_when_it_is_due(sender: Sender):
    run = await sender.measure(
        [request(arrival_s=0.0), request(arrival_s=0.02)], LoadLevel(request_rate=50)
    )
    first, second = run.records
    assert second.start_s - first.start_s == pytest.approx(0.02, abs=1e-9)


async def test_a_tenant_is_named_only_when_there_is_one():
    fake = FakeServe()
    with fake.run(["headrace"], output=None) as server:
        async with open_session(None, 30) as session:
            sender = Sender(session, Target(url=server.url, model="tiny"))
            await sender.send_all([request(tenant="a"), request()], concurrency=1)
    assert [body.get("tenant") for _, body in fake.bodies] == ["a", None]


async def test_a_sender_adds_its_own_fields():
    fake = FakeServe()
    with fake.run(["headrace"], output=None) as server:
        async with open_session(None, 30) as session:
            target = Target(url=server.url, model="tiny")
            await Sender(session, target, fields={"top_k": 3}).send_all([request()])
    assert fake.bodies[0][1]["top_k"] == 3


def test_prompts_can_be_words():
    (prompt,) = plan_prompts([6], seed=1, vocab_size=5000, kind="text")
    assert len(prompt.split()) == 6


async def test_an_answer_of_another_length_has_failed():
    with FakeServe(max_output=3).run(["headrace"], output=None) as server:
        async with open_session(None, 30) as session:
            sender = Sender(session, Target(url=server.url, model="tiny"))
            records = await sender.send_all([request(3), request(4)], concurrency=1)
    assert [record.error for record in records] == [None, "wrong length"]
    assert records[1].error_detail == "3 tokens instead of 4 (finish_reason length)"


async def test_waiting_until_idle_asks_until_nothing_is_unfinished(sender: Sender):
    async def poll(_: float) -> None:
        await running

    async def leave_late() -> None:
        await sender.send(request(50), RequestRecord(index=0, start_s=0.0))

    running = asyncio.create_task(leave_late())
    await asyncio.sleep(0)
    await sender.wait_until_idle(poll)
    await running
    assert (await sender.read_counters()).num_unfinished == 0


async def test_a_warm_up_that_fails_ends_the_measurement():
    with FakeServe(refuse=lambda *_: 400).run(["headrace"], output=None) as server:
        async with open_session(None, 30) as session:
            sender = Sender(session, Target(url=server.url, model="tiny"))
            with pytest.raises(RequestFailed, match="http 400: in the warm-up"):
                await sender.warm_up([request()])


async def test_a_warm_up_sends_all_at_once(sender: Sender):
    await sender.warm_up([request(), request()])
    assert (await sender.read_counters()).steps == 4


async def test_a_server_is_kept_busy_for_as_long_as_a_block_runs():
    fake = FakeServe(pace=lambda body, _: 0.001 if body["max_tokens"] == 1 else 3600.0)
    with fake.run(["headrace"], output=None) as server:
        async with open_session(None, 30) as session:
            sender = Sender(session, Target(url=server.url, model="tiny"))
            # The first three end and are replaced; the others go on for ever.
            plan = [request(1), request(1), request(1), request(9), request(9)]
            async with sender.kept_busy(plan.__getitem__, concurrency=2) as records:
                while (await sender.read_counters()).num_unfinished < 2 or len(records) < 5:
                    await asyncio.sleep(0.001)
            await sender.wait_until_idle()
    assert [record.end_s is None for record in records] == [False, False, False, True, True]
    assert all(record.error is None for record in records)


async def test_an_error_of_the_plan_is_raised_at_the_end_of_the_block(sender: Sender):
    async def keep_busy_with_one_request() -> None:
        async with sender.kept_busy([request(1)].__getitem__, concurrency=1) as records:
            while len(records) < 2:
                await asyncio.sleep(0.001)

    with pytest.raises(ExceptionGroup):
        await keep_busy_with_one_request()
