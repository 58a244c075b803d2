from contextlib import aclosing

import pytest

from fakes import FakeEngine
from gateway.errors import Overloaded
from gateway.generation import GenerationRequest
from gateway.openai.choices import merged_deltas, open_streams


async def prepared(generator, *prompts, **fields):
    return [
        await generator.prepare(GenerationRequest(prompt=prompt, **fields)) for prompt in prompts
    ]


async def test_all_streams_are_read_to_their_ends(make_generator):
    generator = make_generator()
    texts = ["", ""]
    async with open_streams(
        generator, await prepared(generator, "a", "bb", max_tokens=3)
    ) as streams:
        async for item in merged_deltas(streams):
            index, delta = item
            texts[index] += delta.text
    assert texts == ["bcd", "cde"]


@pytest.mark.parametrize("prompts", ["a", "aa"], ids=["one", "two"])
async def test_a_silent_time_yields_nothing_and_loses_nothing(make_generator, prompts):
    generator = make_generator()
    generator.engine.hold()
    text = ""
    requests = await prepared(generator, *prompts, max_tokens=2)
    async with (
        open_streams(generator, requests) as streams,
        aclosing(merged_deltas(streams, idle_s=0.001)) as deltas,
    ):
        async for item in deltas:
            if item is None:
                generator.engine.step()
            else:
                text += item[1].text
    assert sorted(text) == sorted("bc" * len(prompts))


async def test_when_one_cannot_start_none_runs(make_generator):
    generator = make_generator(FakeEngine(max_num_queued_requests=1))
    generator.engine.hold()
    requests = await prepared(generator, "a", "b")
    with pytest.raises(Overloaded):
        async with open_streams(generator, requests):
            pass
    assert generator.engine.submitted == []


@pytest.mark.parametrize("prompts", ["a", "ab"], ids=["one", "two"])
async def test_leaving_early_aborts_all(make_generator, prompts):
    generator = make_generator()
    generator.engine.hold()
    requests = await prepared(generator, *prompts)
    async with (
        open_streams(generator, requests) as streams,
        aclosing(merged_deltas(streams)) as deltas,
    ):
        generator.engine.step()
        await anext(deltas)
    assert (generator.engine.num_active, generator.engine.num_aborts) == (0, len(prompts))
