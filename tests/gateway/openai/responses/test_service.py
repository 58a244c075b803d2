import json

import pytest

from fakes import FakeEngine
from gateway.accounts import Account
from gateway.callers import anonymous_caller
from gateway.config import GatewayConfig
from gateway.errors import Overloaded
from gateway.openai.responses.creation import create_run, read_body
from gateway.openai.responses.service import MAX_HELD_BYTES, ResponseService


@pytest.fixture
async def service():
    service = ResponseService(1 << 20)
    yield service
    await service.close()


@pytest.fixture
def make_run(make_generator):
    async def make(engine, **body):
        return await create_run(
            read_body({"input": "Hi", **body}),
            caller=anonymous_caller(None, None),
            generator=make_generator(engine),
            config=GatewayConfig(),
            stores=[],
        )

    return make


async def run_through(run):
    async for _ in run.events():
        pass
    return run


async def test_what_has_ended_is_kept_if_it_is_wanted(service, make_run):
    engine = FakeEngine()
    engine.script_all("Hello")
    kept = await run_through(await make_run(engine))
    unwanted = await run_through(await make_run(engine, store=False))
    for run in (kept, unwanted):
        service.keep("me", run)
    assert service.store.get("me", kept.response.id).conversation == kept.conversation
    assert service.store.get("me", unwanted.response.id) is None


async def test_a_failed_response_is_not_kept(service, make_run):
    engine = FakeEngine()
    engine.hold()
    run = await make_run(engine)
    events = run.events()
    await anext(events)
    engine.fail_requests()
    async for _ in events:
        pass
    service.keep("me", run)
    assert len(service.store) == 0


async def test_a_response_in_the_background_is_kept_while_it_runs_and_after(service, make_run):
    engine = FakeEngine()
    engine.script_all("Hello")
    engine.hold()
    stored = await service.start("me", await make_run(engine, background=True))
    assert service.store.get("me", stored.response.id) is stored
    assert (stored.response.status, len(stored.events)) == ("in_progress", 2)
    engine.release()
    await stored.wait_ended()
    assert json.loads(stored.events[-1])["type"] == "response.completed"
    assert stored.response.output[0].content[0].text == "Hello"
    assert stored.conversation[-1].content == "Hello"
    assert service.store.num_bytes > 0


async def test_a_response_that_was_forgotten_does_not_come_back(service, make_run):
    engine = FakeEngine()
    engine.hold()
    stored = await service.start("me", await make_run(engine, background=True))
    service.store.delete("me", stored.response.id)
    stored.cancel()
    await stored.wait_ended()
    assert len(service.store) == 0
    assert engine.num_active == 0


async def test_closing_ends_what_runs_as_failed(service, make_run):
    engine = FakeEngine()
    engine.hold()
    stored = await service.start("me", await make_run(engine, background=True))
    await service.close()
    assert stored.response.status == "failed"
    assert json.loads(stored.events[-1])["type"] == "response.failed"
    assert engine.num_active == 0


async def test_an_event_that_cannot_be_written_ends_the_response_as_failed(
    service, make_run, caplog
):
    run = await make_run(FakeEngine(), background=True)

    async def events():
        yield []
        yield [{"type": "\ud800"}]

    run.events = events
    stored = await service.start("me", run)
    await stored.wait_ended()
    assert (stored.response.status, stored.response.error.code) == ("failed", "server_error")
    assert json.loads(stored.events[-1])["type"] == "response.failed"
    assert service.store.num_bytes > 0
    assert "a response in the background failed" in caplog.text


async def test_a_response_that_has_ended_does_not_keep_its_run(service, make_run):
    stored = await service.start("me", await make_run(FakeEngine(), background=True))
    await stored.wait_ended()
    assert not hasattr(stored.cancel, "__self__")
    status = stored.response.status
    stored.cancel()
    assert stored.response.status == status


def test_the_open_requests_of_an_account_have_only_so_many_bytes():
    service = ResponseService(1 << 20)
    alice, bob = Account("alice"), Account("bob")
    service.hold(alice, MAX_HELD_BYTES - 1)
    service.hold(alice, 1)
    with pytest.raises(Overloaded):
        service.hold(alice, 1)
    service.hold(bob, MAX_HELD_BYTES + 1)  # a single one is bounded elsewhere
    service.release(alice, MAX_HELD_BYTES)
    service.hold(alice, 1)
