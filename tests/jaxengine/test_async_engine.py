import asyncio
import random

import pytest

from async_loop import VOCAB_SIZE, Start, ask, expected, launches, make_engine, read, starting
from engine_loop import small_config
from fake_runner import FakeModelRunner
from jaxengine.errors import EngineStoppingError, InvalidRequestError, QueueFullError
from jaxengine.output_stream import OutputStream
from jaxengine.outputs import FinishReason
from jaxengine.step_time import StepWork
from known_times import KnownTimes


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
async def start(request):
    async with starting(overlap=request.param) as start_one:
        yield start_one


def steps_of(runner: FakeModelRunner, stream: OutputStream) -> list[int]:
    """In which steps a request was."""
    return [i for i, step in enumerate(runner.steps) if stream.request_id in dict(step)]


async def test_a_request_is_answered_with_the_tokens_computed_by_hand(start: Start):
    engine, _ = start()
    async with ask(engine) as stream:
        whole = await read(stream)
    assert whole.request_id == stream.request_id
    assert whole.new_token_ids == (14, 70, 20)
    assert whole.finish_reason is FinishReason.LENGTH
    assert whole.timing is not None
    assert len(whole.new_token_times_s) == 3


async def test_an_engine_is_ready_from_start_to_stop():
    config = small_config()
    engine = make_engine(config, FakeModelRunner(config))
    assert not engine.is_ready
    with pytest.raises(EngineStoppingError):
        ask(engine)
    engine.start()
    assert engine.is_ready
    await engine.stop(drain_timeout_s=0)
    assert not engine.is_ready
    assert engine.failure is None


async def test_many_requests_at_once_get_their_own_tokens(start: Start):
    engine, _ = start()
    prompts = [tuple(range(n, 2 * n + 1)) for n in range(1, 12)]
    streams = [ask(engine, prompt, max_tokens=9) for prompt in prompts]
    assert len({stream.request_id for stream in streams}) == len(streams)
    wholes = await asyncio.gather(*map(read, streams))
    assert [w.new_token_ids for w in wholes] == [expected(prompt, 9) for prompt in prompts]


async def test_who_comes_early_in_a_step_joins_the_next_one():
    class LongSteps(KnownTimes):
        def predict(self, work: StepWork) -> float:
            return 1.0  # so the host waits for half a second

    async with starting(overlap=True) as start_one:
        engine, runner = start_one(step_times=LongSteps())
        first = ask(engine, (1, 2, 3), max_tokens=2)
        await launches(runner, 1)
        second = ask(engine, (3, 2, 1), max_tokens=1)
        await asyncio.gather(read(first), read(second))
        assert [len(step) for step in runner.steps] == [1, 2]


async def test_tokens_merge_while_nobody_reads(start: Start):
    engine, _ = start()
    stream = ask(engine, max_tokens=20)
    await engine.stop(drain_timeout_s=60)
    outputs = [output async for output in stream]
    assert [output.new_token_ids for output in outputs] == [expected((1, 2, 3), 20)]


async def test_a_stream_that_nobody_reads_delays_nobody(start: Start):
    engine, _ = start()
    unread = ask(engine, max_tokens=40)
    assert (await read(ask(engine))).new_token_ids == (14, 70, 20)
    assert (await read(unread)).new_token_ids == expected((1, 2, 3), 40)


async def test_tokens_come_as_they_are_made(start: Start):
    engine, runner = start()
    runner.hold()
    stream = ask(engine)
    for token_id in (14, 70, 20):
        runner.release(1)
        assert (await anext(stream)).new_token_ids == (token_id,)


# Leaving.


async def test_leaving_early_frees_all_blocks_within_a_step(start: Start):
    engine, runner = start(num_blocks=5, max_model_len=32, max_num_batched_tokens=32)
    runner.hold()
    async with ask(engine, range(25), max_tokens=7) as left:
        await launches(runner, 1)
    needs_all_blocks = ask(engine, range(30, 60), max_tokens=2)
    runner.release()
    assert (await read(needs_all_blocks)).new_token_ids == expected(range(30, 60), 2)
    # With overlap one more step may have been under way.
    assert len(steps_of(runner, left)) <= 2
    assert steps_of(runner, needs_all_blocks)[0] == len(steps_of(runner, left))


async def test_leaving_while_waiting_means_never_to_run(start: Start):
    engine, runner = start(max_num_seqs=1)
    runner.hold()
    first = ask(engine)
    await launches(runner, 1)
    ask(engine).close()
    third = ask(engine)
    runner.release()
    await asyncio.gather(read(first), read(third))
    assert len(runner.requests) == 2


async def test_leaving_after_the_end_is_harmless(start: Start):
    engine, _ = start()
    async with ask(engine) as stream:
        await read(stream)
    stream.close()
    assert (await read(ask(engine))).new_token_ids == (14, 70, 20)


async def test_leaving_while_the_last_token_is_on_its_way_is_harmless(start: Start):
    engine, runner = start()
    runner.hold()
    stream = ask(engine, max_tokens=1)
    await launches(runner, 1)
    stream.close()
    stream.close()
    runner.release()
    assert [output async for output in stream] == []
    assert (await read(ask(engine))).new_token_ids == (14, 70, 20)


async def test_a_cancelled_reader_leaves(start: Start):
    engine, runner = start()
    runner.hold()

    async def read_for_ever():
        async with ask(engine, max_tokens=40) as stream:
            await read(stream)

    reader = asyncio.create_task(read_for_ever())
    await launches(runner, 1)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    runner.release()
    assert (await read(ask(engine))).new_token_ids == (14, 70, 20)
    assert engine.stats().generation_tokens < 40


async def test_64_streams_with_random_disconnects_leave_nothing_behind(start: Start):
    # 12 blocks for 8 requests of up to 4 blocks: some give way. Prompts share beginnings.
    engine, _ = start(
        num_blocks=13, max_model_len=32, max_num_seqs=8, max_num_queued_requests=64, watermark=0.01
    )
    chance = random.Random(1)
    ends = dict.fromkeys(FinishReason, 0)

    async def use_one(prompt: tuple[int, ...], max_tokens: int, patience: int) -> None:
        tokens: tuple[int, ...] = ()
        async with ask(engine, prompt, max_tokens=max_tokens) as stream:
            async for output in stream:
                tokens += output.new_token_ids
                if output.finished:
                    ends[output.finish_reason] += 1
                    assert tokens == expected(prompt, max_tokens)
                elif len(tokens) >= patience:
                    break
        assert tokens == expected(prompt, max_tokens)[: len(tokens)]

    async with asyncio.TaskGroup() as group:
        for index in range(64):
            prompt = (*range(chance.choice((0, 8, 16))), chance.randrange(VOCAB_SIZE))
            patience = 0 if index % 8 == 0 else chance.choice((1, 5, 100))
            task = use_one(prompt, chance.randrange(1, 15), patience)
            group.create_task(task)
            if index % 5 == 0:
                await asyncio.sleep(0)
    assert ends[FinishReason.LENGTH] >= 8
    assert ends[FinishReason.ERROR] == ends[FinishReason.ABORT] == 0
    await engine.stop(drain_timeout_s=60)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks == 12


# What is refused.


async def test_the_queue_has_a_bound(start: Start):
    engine, runner = start(max_num_seqs=1, max_num_queued_requests=2)
    runner.hold()
    streams = [ask(engine) for _ in range(3)]
    with pytest.raises(QueueFullError, match="3 requests are running or waiting") as refusal:
        ask(engine)
    assert refusal.value.retry_after_s > 0
    streams.pop().close()
    streams.append(ask(engine))  # a place was freed at once
    runner.release()
    wholes = await asyncio.gather(*map(read, streams))
    assert {whole.new_token_ids for whole in wholes} == {(14, 70, 20)}
    assert (await read(ask(engine))).new_token_ids == (14, 70, 20)


async def test_without_a_queue_as_many_as_can_run_are_accepted(start: Start):
    engine, runner = start(max_num_seqs=2, max_num_queued_requests=0)
    runner.hold()
    streams = [ask(engine) for _ in range(2)]
    with pytest.raises(QueueFullError):
        ask(engine)
    runner.release()
    await asyncio.gather(*map(read, streams))


@pytest.mark.parametrize(
    ("prompt", "stop_token_ids", "field", "complaint"),
    [
        ((), (), "prompt", "the prompt is empty"),
        ([1] * 64, (), "prompt", "the prompt has 64 tokens, which leaves no room"),
        ([1] * 1000, (), "prompt", "the prompt has 1000 tokens, which leaves no room"),
        ((1, 100), (), "prompt", "prompt has a token id outside the vocabulary of 100"),
        ((1, -1), (), "prompt", "prompt has a token id outside the vocabulary of 100"),
        ((1,), (100,), "stop_token_ids", "stop_token_ids has a token id outside the vocabulary"),
        ((1,), (5, -1), "stop_token_ids", "stop_token_ids has a token id outside the vocabulary"),
    ],
)
async def test_a_request_that_can_never_run_is_refused_by_field(
    start: Start, prompt, stop_token_ids, field, complaint
):
    engine, runner = start()
    with pytest.raises(InvalidRequestError, match=complaint) as refusal:
        ask(engine, prompt, stop_token_ids=stop_token_ids)
    assert refusal.value.field == field
    assert refusal.value.code == ("context_length_exceeded" if len(prompt) >= 64 else None)
    await engine.stop(drain_timeout_s=60)
    assert runner.steps == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("allowed_token_ids", (1, 100)),
        ("allowed_token_ids", (-1,)),
        ("logit_bias", ((1, 0.5), (100, 0.5))),
        ("logit_bias", ((-1, 0.5),)),
        ("bad_words", ((1,), (2, 100))),
        ("bad_words", ((-1, 2),)),
    ],
)
async def test_rules_about_tokens_that_there_are_not_are_refused_by_field(
    start: Start, field, value
):
    engine, _ = start()
    with pytest.raises(
        InvalidRequestError, match=f"{field} has a token id outside the vocabulary of 100"
    ) as refusal:
        ask(engine, **{field: value})
    assert refusal.value.field == field


async def test_a_prompt_that_leaves_room_for_one_token_is_accepted(start: Start):
    engine, _ = start()
    whole = await read(ask(engine, [1] * 63, max_tokens=50))
    assert whole.new_token_ids == (63 * 64 // 2 % 100,)
    assert whole.finish_reason is FinishReason.LENGTH


async def test_the_largest_and_the_smallest_token_id_are_accepted(start: Start):
    engine, _ = start()
    whole = await read(ask(engine, (0, 99), max_tokens=1, stop_token_ids=(0, 99)))
    assert whole.new_token_ids == (98,)


# What is passed on.


@pytest.mark.parametrize(
    ("given", "kept"),
    [(0, 0), (5, 5), (2**64 - 1, 2**64 - 1), (-1, 2**64 - 1), (-(2**63), 2**63)],
)
async def test_a_given_seed_is_kept_modulo_2_to_the_64(start: Start, given, kept):
    engine, runner = start()
    stream = ask(engine, seed=given)
    await read(stream)
    assert runner.requests[stream.request_id].seed == kept


async def test_without_a_seed_each_request_draws_a_fresh_one(start: Start):
    engine, runner = start()
    await asyncio.gather(*(read(ask(engine)) for _ in range(8)))
    seeds = {request.seed for request in runner.requests.values()}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**64 for seed in seeds)


async def test_a_salt_keeps_the_cache_of_a_tenant_apart(start: Start):
    engine, _ = start()
    cached = []
    for salt in ("a", "b", "a", None, ""):
        whole = await read(ask(engine, range(20), max_tokens=1, salt=salt))
        cached.append(whole.num_cached_tokens)
    assert cached == [0, 0, 16, 0, 0]


async def test_a_prompt_changed_after_submission_is_still_the_one_submitted(start: Start):
    engine, _ = start()
    prompt = [1, 2, 3]
    stream = ask(engine, prompt)
    prompt.append(4)
    assert (await read(stream)).new_token_ids == (14, 70, 20)


async def test_the_limits_and_the_statistics_are_those_of_the_engine(start: Start):
    engine, _ = start()
    assert engine.limits.max_model_len == 64
    assert engine.stats().num_blocks == 16
    await read(ask(engine))
    await engine.stop(drain_timeout_s=60)
    assert (engine.stats().prompt_tokens, engine.stats().generation_tokens) == (3, 3)
