from contextlib import aclosing

import pytest

from fakes import FakeEngine
from gateway.callers import anonymous_caller
from gateway.config import GatewayConfig
from gateway.errors import GatewayError, InternalError
from gateway.openai.responses.creation import create_run, read_body


@pytest.fixture
def make_run(make_generator):
    async def make(engine, **body):
        generator = make_generator(engine)
        return await create_run(
            read_body({"input": "Hi", **body}),
            caller=anonymous_caller(None, None),
            generator=generator,
            config=GatewayConfig(),
            stores=[],
        )

    return make


async def kinds_of(run):
    async with aclosing(run.events()) as events:
        return [event["type"].removeprefix("response.") async for b in events for event in b or ()]


async def test_an_answer_is_told_from_beginning_to_end(make_run):
    engine = FakeEngine()
    engine.script_all("Hello")
    run = await make_run(engine)
    kinds = await kinds_of(run)
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] == "completed"
    assert run.has_ended
    assert [(m.role, m.content) for m in run.conversation] == [
        ("user", "Hi"),
        ("assistant", "Hello"),
    ]


async def test_a_refusal_is_raised_before_anything_is_told(make_run):
    engine = FakeEngine()
    run = await make_run(engine)
    engine.refuse("queue_full", retry_after_s=1)
    with pytest.raises(GatewayError) as caught:
        await anext(run.events())
    assert caught.value.status == 429


async def test_cancelling_ends_it_with_what_there_is(make_run):
    engine = FakeEngine()
    engine.hold()
    run = await make_run(engine)
    run.cancel()  # nothing to cancel yet
    async with aclosing(run.events()) as events:
        await anext(events)
        engine.step(3)
        await anext(events)
        run.cancel()
        last = [event async for batch in events for event in batch]
    assert last[-1]["type"] == "response.cancelled"
    assert (run.response.status, run.response.usage.output_tokens) == ("cancelled", 3)
    assert engine.num_aborts == 1


async def test_leaving_the_events_aborts_the_request(make_run):
    engine = FakeEngine()
    engine.hold()
    run = await make_run(engine)
    async with aclosing(run.events()) as events:
        await anext(events)
    assert engine.num_active == 0


async def test_silence_is_told(make_run):
    engine = FakeEngine()
    engine.hold()
    run = await make_run(engine)
    async with aclosing(run.events(idle_s=0.001)) as events:
        await anext(events)
        assert await anext(events) is None


async def test_a_failure_of_the_engine_is_the_last_event(make_run):
    engine = FakeEngine()
    engine.hold()
    run = await make_run(engine)
    async with aclosing(run.events()) as events:
        await anext(events)
        engine.fail_requests()
        [batch] = [batch async for batch in events]
    assert batch[-1]["type"] == "response.failed"
    assert isinstance(run.failure, InternalError)
    assert run.fail(InternalError()) == []  # once is enough


async def test_a_prompt_can_be_computed_without_an_answer(make_run):
    engine = FakeEngine()
    run = await make_run(engine, generate=False)
    assert await kinds_of(run) == ["created", "in_progress", "completed"]
    assert run.response.output == ()
    [(_, params)] = engine.submitted
    assert params.max_tokens == 1
