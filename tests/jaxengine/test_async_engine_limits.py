"""Time limits, closed batches, overload and step records, through the thread of the engine."""

import asyncio
import itertools

import pytest

from async_loop import Start, ask, expected, launches, read, starting
from jaxengine.async_engine import AsyncEngine
from jaxengine.errors import InvalidRequestError, QueueFullError
from jaxengine.outputs import FinishReason
from jaxengine.sampling_params import SamplingParams
from jaxengine.token_engine import TokenRequest


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
async def start(request):
    async with starting(overlap=request.param) as start_one:
        yield start_one


def make_request(prompt=(1, 2, 3), max_tokens=3, **fields) -> TokenRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return TokenRequest(prompt_token_ids=prompt, params=params, **fields)


def count_steps(engine: AsyncEngine) -> itertools.count:
    """Count how often the thread steps, whether there is something to do or not."""
    counter = itertools.count()
    core = engine._core
    step = core.step

    def counted():
        next(counter)
        return step()

    core.step = counted
    return counter


async def test_what_concerns_scheduling_is_passed_on(start: Start):
    engine, runner = start()
    stream = ask(engine, tenant="t", priority=-3, queue_timeout_s=50.0, deadline_s=70.0)
    await read(stream)
    request = runner.requests[stream.request_id]
    assert (request.tenant, request.priority) == ("t", -3)
    assert (request.queue_timeout_s, request.deadline_s) == (50.0, 70.0)


async def test_a_request_without_a_queue_timeout_gets_the_engines(start: Start):
    engine, runner = start(queue_timeout_s=60.0)
    own, default = ask(engine, queue_timeout_s=50.0), ask(engine)
    await asyncio.gather(read(own), read(default))
    timeouts_s = [runner.requests[s.request_id].queue_timeout_s for s in (own, default)]
    assert timeouts_s == [50.0, 60.0]


async def test_weights_reach_the_scheduler(start: Start):
    engine, _ = start()
    engine.set_tenant_weights({"heavy": 3.0})
    await read(ask(engine, tenant="heavy"))
    tenants = engine._core._scheduler.roster.tenants
    assert tenants.arrive("heavy", first_waiting=None).weight == 3.0


# Time runs out.


async def test_a_request_that_waits_too_long_ends_and_never_runs(start: Start):
    engine, runner = start(max_num_seqs=1)
    runner.hold()
    runs = ask(engine)
    await launches(runner, 1)
    waits = ask(engine, queue_timeout_s=0.0)
    runner.release()
    whole = await read(waits)
    assert (whole.finish_reason, whole.new_token_ids) == (FinishReason.QUEUE_TIMEOUT, ())
    assert whole.timing is not None
    assert (await read(runs)).new_token_ids == (14, 70, 20)
    assert waits.request_id not in runner.requests


async def test_a_deadline_ends_a_request_that_runs_with_what_it_has(start: Start):
    # Long enough never to finish by itself while the test lasts.
    engine, _ = start(num_blocks=2001, max_model_len=16_000)
    whole = await read(ask(engine, max_tokens=15_000, deadline_s=0.05))
    assert whole.finish_reason is FinishReason.DEADLINE
    tokens = whole.new_token_ids
    assert tokens == expected((1, 2, 3), max(1, len(tokens)))[: len(tokens)]


async def test_both_limits_at_once_do_not_kill_the_engine(start: Start):
    engine, _ = start()
    whole = await read(ask(engine, queue_timeout_s=0.0, deadline_s=0.0))
    assert whole.finish_reason in (FinishReason.QUEUE_TIMEOUT, FinishReason.DEADLINE)
    assert (await read(ask(engine))).new_token_ids == (14, 70, 20)


async def test_the_thread_wakes_up_for_a_timeout_and_does_not_spin_until_then(start: Start):
    engine, runner = start(batching="static")
    num_steps = count_steps(engine)
    whole = await read(ask(engine, queue_timeout_s=0.05))
    assert whole.finish_reason is FinishReason.QUEUE_TIMEOUT
    assert runner.steps == []
    assert next(num_steps) <= 4


# Closed batches.


async def test_the_thread_wakes_up_when_the_window_of_a_batch_is_over(start: Start):
    engine, runner = start(batching="dynamic", batch_window_s=0.05)
    num_steps = count_steps(engine)
    first = ask(engine)
    second = ask(engine, (3, 2, 1))
    wholes = await asyncio.gather(read(first), read(second))
    assert [whole.new_token_ids for whole in wholes] == [(14, 70, 20), expected((3, 2, 1), 3)]
    assert [len(step) for step in runner.steps] == [2, 2, 2]
    assert next(num_steps) <= 3 + 5  # the steps, and looks before and after them


async def test_a_batch_that_waits_can_be_left_and_stopped(start: Start):
    engine, runner = start(batching="static")
    left, waits = ask(engine), ask(engine)
    left.close()
    await engine.stop(drain_timeout_s=0)
    assert (await read(waits)).finish_reason is FinishReason.ABORT
    assert runner.steps == []


async def test_a_full_batch_does_not_wait(start: Start):
    engine, _ = start(batching="static", max_num_seqs=2)
    wholes = await asyncio.gather(read(ask(engine)), read(ask(engine)))
    assert {whole.new_token_ids for whole in wholes} == {(14, 70, 20)}


# All or none.


async def test_a_list_is_accepted_whole(start: Start):
    engine, _ = start()
    streams = engine.submit([make_request(), make_request((3, 2, 1)), make_request((5,))])
    wholes = await asyncio.gather(*map(read, streams))
    assert [w.new_token_ids for w in wholes] == [
        expected(prompt, 3) for prompt in ((1, 2, 3), (3, 2, 1), (5,))
    ]
    assert engine.submit([]) == []


async def test_a_list_of_which_one_can_never_run_is_refused_whole(start: Start):
    engine, runner = start()
    with pytest.raises(InvalidRequestError):
        engine.submit([make_request(), make_request(), make_request([1] * 64)])
    await engine.stop(drain_timeout_s=60)
    assert runner.steps == []


async def test_a_list_that_is_longer_than_the_queue_is_refused_whole(start: Start):
    engine, runner = start(max_num_seqs=1, max_num_queued_requests=2)
    with pytest.raises(QueueFullError) as refusal:
        engine.submit([make_request()] * 4)
    assert refusal.value.reason == "queued_requests"
    with pytest.raises(QueueFullError):
        engine.check_capacity(4)
    engine.check_capacity(3)
    streams = engine.submit([make_request()] * 3)
    await asyncio.gather(*map(read, streams))
    assert len(runner.requests) == 3


async def test_prompt_tokens_have_a_bound_and_retry_after_says_when(start: Start):
    engine, runner = start(max_num_seqs=1, max_num_queued_tokens=50)
    runner.hold()
    runs = ask(engine)
    await launches(runner, 1)
    waits = ask(engine, [1] * 40)
    with pytest.raises(QueueFullError) as refusal:
        ask(engine, [1] * 40)
    assert refusal.value.reason == "queued_tokens"
    assert 1.0 <= refusal.value.retry_after_s <= 120.0
    runner.release()
    await asyncio.gather(read(runs), read(waits))


async def test_counts_return_to_zero_whatever_way_requests_end(start: Start):
    engine, runner = start(max_num_seqs=1, max_num_queued_requests=5, max_num_queued_tokens=40)
    for _ in range(5):
        runner.hold()
        streams = [ask(engine, tenant="ab"[index % 2]) for index in range(4)]
        streams.append(ask(engine, queue_timeout_s=0.0))
        streams.append(ask(engine, deadline_s=0.0))
        for stream in (streams.pop(0), streams.pop(1)):
            stream.close()
        runner.release()
        await asyncio.gather(*map(read, streams))
    runner.hold()
    full = [ask(engine) for _ in range(6)]
    with pytest.raises(QueueFullError):
        ask(engine)
    runner.release()
    await asyncio.gather(*map(read, full))


async def test_a_light_tenant_gets_in_where_a_flooder_is_shut_out(start: Start):
    engine, runner = start(max_num_seqs=2, max_num_queued_requests=4)
    runner.hold()
    flood = [ask(engine, tenant="flooder", max_tokens=20) for _ in range(6)]
    with pytest.raises(QueueFullError):
        ask(engine, tenant="flooder")
    light = ask(engine, tenant="light")
    runner.release()
    assert (await read(light)).new_token_ids == (14, 70, 20)
    wholes = await asyncio.gather(*map(read, flood))
    assert {whole.new_token_ids for whole in wholes} == {expected((1, 2, 3), 20)}


# What every step did.


async def test_records_of_all_steps_reach_the_log_in_order(start: Start):
    engine, runner = start()
    streams = [ask(engine, range(n, n + 9), max_tokens=4) for n in range(6)]
    await asyncio.gather(*map(read, streams))
    await engine.stop(drain_timeout_s=60)
    records = engine.steps.after(-1)
    assert [record.index for record in records] == list(range(len(runner.steps)))
    steps = [[(share.request_id, share.num_tokens) for share in r.shares] for r in records]
    assert steps == runner.steps
    assert engine.steps.last_index == engine.stats().num_steps - 1
    for before, after in itertools.pairwise(records):
        assert after.device_start_s >= before.end_s


async def test_whoever_waits_for_a_step_is_woken_by_it(start: Start):
    engine, _ = start()
    waiting = asyncio.create_task(engine.steps.wait_after(-1))
    await asyncio.sleep(0)
    stream = ask(engine)
    records = await waiting
    assert records[0].index == 0
    assert records[0].shares[0].request_id == stream.request_id
    await read(stream)


async def test_only_so_many_records_are_kept(start: Start):
    engine, _ = start(num_step_records=5)
    await read(ask(engine, max_tokens=20))
    await engine.stop(drain_timeout_s=60)
    records = engine.steps.after(-1)
    assert [record.index for record in records] == list(
        range(engine.stats().num_steps - 5, engine.stats().num_steps)
    )
