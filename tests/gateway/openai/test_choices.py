import pytest

from fakes import FakeEngine
from gateway.errors import Overloaded
from gateway.generation import GenerationRequest
from gateway.openai.choices import open_streams


async def prepared(generator, *prompts):
    return [await generator.prepare(GenerationRequest(prompt=prompt)) for prompt in prompts]


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
    async with open_streams(generator, await prepared(generator, *prompts)):
        generator.engine.step()
    assert (generator.engine.num_active, generator.engine.num_aborts) == (0, len(prompts))
