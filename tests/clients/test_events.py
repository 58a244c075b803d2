"""Stream.events: what happens, in order."""

import pytest

from cutting_proxy import cutting_proxy
from fakes import FakeEngine
from headrace_client import AsyncClient, Finished, Resumed, Started, TextDelta, retry
from stream_app import serve_streams


async def test_an_answer_is_started_texts_and_finished():
    async with serve_streams() as gateway, AsyncClient(gateway.base_url) as client:
        stream = await client.complete("Hi!", max_tokens=4)
        first, *texts, last = [event async for event in stream.events()]
    assert first == Started(request_id="r0", prompt_tokens=3)
    assert "".join(text.text for text in texts if isinstance(text, TextDelta)) == "defg"
    assert isinstance(last, Finished)
    assert (last.finish_reason, last.stop_reason) == ("length", None)
    assert (last.usage, last.timing) == (stream.usage, stream.timing)


async def test_a_connection_that_was_lost_is_told_before_the_text_that_follows(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_DELAY_S", 0.001)
    engine = FakeEngine()
    engine.hold()
    async with (
        serve_streams(engine) as gateway,
        cutting_proxy(gateway.client.port) as proxy,
        AsyncClient(proxy.base_url) as client,
    ):
        stream = await client.complete("Hi!", max_tokens=4)
        events = stream.events()
        assert isinstance(await anext(events), Started)
        for number, text in enumerate("def"):
            engine.step()
            if number > 0:
                assert await anext(events) == Resumed(num_resumes=number)
            assert await anext(events) == TextDelta(text=text)
            proxy.cut_all()
        engine.release()
        assert await anext(events) == Resumed(num_resumes=3)
        assert await anext(events) == TextDelta(text="g")
        assert isinstance(await anext(events), Finished)
        with pytest.raises(StopAsyncIteration):
            await anext(events)
