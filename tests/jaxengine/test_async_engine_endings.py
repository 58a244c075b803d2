"""How an engine stops, fails and dies: whoever waits for it always gets an answer."""

import asyncio
import logging

import pytest

from async_loop import Start, ask, launches, make_engine, read, starting
from engine_loop import small_config
from fake_runner import FakeModelRunner
from jaxengine.engine_core import STEP_FAILED
from jaxengine.errors import EngineDeadError, EngineStalledError, EngineStoppingError
from jaxengine.outputs import FinishReason


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
async def start(request):
    async with starting(overlap=request.param) as start_one:
        yield start_one


@pytest.fixture(autouse=True)
def _expected_failures_are_not_printed(caplog):
    caplog.set_level(logging.CRITICAL + 1)


async def test_draining_finishes_what_was_accepted_and_accepts_nothing_more(start: Start):
    engine, runner = start(max_num_seqs=1)
    runner.hold()
    streams = [ask(engine) for _ in range(3)]
    await launches(runner, 1)
    stopping = asyncio.create_task(engine.stop(drain_timeout_s=60))
    await asyncio.sleep(0)
    assert not engine.is_ready
    with pytest.raises(EngineStoppingError):
        ask(engine)
    runner.release()
    await stopping
    wholes = await asyncio.gather(*map(read, streams))
    assert {(w.new_token_ids, w.finish_reason) for w in wholes} == {
        ((14, 70, 20), FinishReason.LENGTH)
    }


async def test_a_drain_that_times_out_aborts_the_rest(start: Start):
    # Long enough never to finish by itself while the test lasts.
    engine, runner = start(num_blocks=2001, max_model_len=16_000, max_num_seqs=1)
    runs, waits = (ask(engine, max_tokens=15_000) for _ in range(2))
    await launches(runner, 1)
    await engine.stop(drain_timeout_s=0)
    for stream in (runs, waits):
        whole = await read(stream)
        assert whole.finish_reason is FinishReason.ABORT
        assert whole.timing is not None
    assert whole.new_token_ids == ()


async def test_stopping_twice_is_harmless_and_what_is_stopped_accepts_nothing(start: Start):
    engine, _ = start()
    await engine.stop(drain_timeout_s=60)
    await engine.stop(drain_timeout_s=60)
    with pytest.raises(EngineStoppingError, match="shutting down"):
        ask(engine)


async def test_stopping_what_was_never_started_is_harmless():
    config = small_config()
    engine = make_engine(config, FakeModelRunner(config))
    await engine.stop(drain_timeout_s=60)
    with pytest.raises(EngineStoppingError):
        ask(engine)


# Failures.


async def test_a_failed_step_fails_its_requests_and_the_engine_lives_on(start: Start):
    engine, runner = start(max_num_seqs=1)
    runner.fail_launch(0)
    failed, waited = ask(engine), ask(engine)
    whole = await read(failed)
    assert (whole.finish_reason, whole.error) == (FinishReason.ERROR, STEP_FAILED)
    assert (await read(waited)).new_token_ids == (14, 70, 20)
    assert engine.is_ready
    assert engine.failure is None


class BrokenRunner(FakeModelRunner):
    """A device that does not come back after a failure."""

    def reset(self) -> None:
        raise RuntimeError("the device is gone")


async def test_a_dead_engine_fails_every_stream_and_every_later_request(start: Start):
    engine, runner = start(max_num_seqs=1)
    for step in range(6):
        runner.fail_launch(step)
    streams = [ask(engine) for _ in range(6)]
    wholes = await asyncio.gather(*map(read, streams))
    assert {w.finish_reason for w in wholes} == {FinishReason.ERROR}
    assert [w.error for w in wholes] == [STEP_FAILED] * 2 + ["the engine has failed"] * 4
    assert not engine.is_ready
    assert engine.failure is not None
    assert "3 steps failed in a row" in engine.failure
    assert engine.stats().num_step_failures == 3
    with pytest.raises(EngineDeadError, match="3 steps failed in a row"):
        ask(engine)
    await engine.stop(drain_timeout_s=60)


async def test_an_error_that_nobody_foresaw_kills_the_engine_and_not_the_callers(start: Start):
    engine, runner = start(BrokenRunner)
    runner.fail_result(0)
    streams = [ask(engine) for _ in range(3)]
    wholes = await asyncio.gather(*map(read, streams))
    assert {w.error for w in wholes} == {"the engine has failed"}
    assert engine.failure == "RuntimeError: the device is gone"


async def test_an_engine_that_dies_while_it_drains_still_stops(start: Start):
    engine, runner = start(BrokenRunner)
    runner.hold()
    runner.fail_result(0)
    stream = ask(engine)
    await launches(runner, 1)
    stopping = asyncio.create_task(engine.stop(drain_timeout_s=60))
    await asyncio.sleep(0)
    runner.release()
    await stopping
    assert (await read(stream)).finish_reason is FinishReason.ERROR


# Steps that hang.


async def becoming(condition):
    """Wait until it holds."""
    while not condition():
        await asyncio.sleep(0)


@pytest.fixture
def stalls(start: Start, caplog):
    """Start an engine whose steps hang until its runner is released."""
    caplog.set_level(logging.WARNING)

    def start_one():
        engine, runner = start(step_timeout_s=0.02)
        runner.hold()
        return engine, runner

    return start_one


async def test_a_step_that_hangs_is_noticed_and_told_and_may_end_after_all(stalls, caplog):
    engine, runner = stalls()
    stream = ask(engine)
    await becoming(lambda: engine.is_stalled)
    assert not engine.is_ready
    assert engine.failure is None
    assert engine.stats().num_stalls == 1
    with pytest.raises(EngineStalledError):
        ask(engine)
    [record] = [r for r in caplog.records if r.levelname == "CRITICAL"]
    assert record.getMessage() == "the engine is stalled: no step has ended for 0.02 s"
    assert "3 tokens of 1 requests (req-" in record.fields["steps_in_flight"]
    assert "hand_out (fake_runner.py:" in record.fields["engine_thread"]
    runner.release()
    assert (await read(stream)).new_token_ids == (14, 70, 20)
    await becoming(lambda: engine.is_ready)
    assert engine.stats().num_stalls == 1
    assert (await read(ask(engine))).new_token_ids == (14, 70, 20)


async def test_a_step_that_hangs_is_noticed_when_all_clients_have_left(stalls):
    engine, runner = stalls()
    stream = ask(engine)
    await launches(runner, 1)
    stream.close()
    await becoming(lambda: engine.is_stalled)
    runner.release()
    await becoming(lambda: engine.is_ready)


async def test_stopping_does_not_wait_for_a_step_that_hangs(stalls):
    engine, runner = stalls()
    streams = [ask(engine) for _ in range(6)]
    await launches(runner, 1)
    await engine.stop(drain_timeout_s=0)
    wholes = await asyncio.gather(*map(read, streams))
    assert {w.finish_reason for w in wholes} == {FinishReason.ERROR}


async def test_when_all_have_left_the_counts_say_so(start: Start):
    # Without a step in flight, the thread has nothing more to wait for.
    engine, runner = start(overlap=False, max_num_seqs=1)
    runner.hold()
    streams = [ask(engine) for _ in range(3)]
    await launches(runner, 1)
    for stream in streams:
        stream.close()
    runner.release()
    await becoming(lambda: engine.stats().num_steps == 1)
    await becoming(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


async def test_an_idle_engine_is_not_stalled(start: Start):
    engine, _ = start(step_timeout_s=0.001)
    assert (await read(ask(engine))).new_token_ids == (14, 70, 20)
    for _ in range(30):
        await asyncio.sleep(0.001)
    assert engine.is_ready
    assert engine.stats().num_stalls == 0
