"""Log-probabilities come with the tokens that they are about, however these come."""

import pytest

from fakes import EOS, fake_logprobs
from gateway.generation import GenerationRequest
from gateway.token_wishes import TokenWishes
from generating import generate, joined
from jaxengine.outputs import FinishReason as EngineFinish

TWO = TokenWishes(logprobs=2)


def told(deltas, last):
    """Return all tokens and what was said of them; in each delta one for each."""
    assert all(len(delta.token_ids) == len(delta.logprobs) for delta in [*deltas, last])
    ids = sum((delta.token_ids for delta in [*deltas, last]), ())
    return ids, sum((delta.logprobs for delta in [*deltas, last]), ())


async def test_every_token_has_its_own(make_generator):
    ids, logprobs = told(*await generate(make_generator(), max_tokens=4, tokens=TWO))
    assert ids == tuple(b"defg")
    assert logprobs == tuple(fake_logprobs(i, 2) for i in ids)


async def test_tokens_without_text_wait_with_theirs_for_the_next_text(make_generator):
    """The first byte of a character, and EOS."""
    generator = make_generator()
    generator.engine.script("Hi!", "é")
    deltas, last = await generate(generator, tokens=TWO)
    assert joined(deltas, last) == "é"
    ids, logprobs = told(deltas, last)
    assert ids == (*"é".encode(), EOS)
    assert logprobs == tuple(fake_logprobs(i, 2) for i in ids)


async def test_they_end_with_the_stop_string(make_generator):
    deltas, last = await generate(make_generator(), max_tokens=20, stop=("fg",), tokens=TWO)
    assert joined(deltas, last) == "de"
    ids, _ = told(deltas, last)
    assert ids == tuple(b"defg")


async def test_outputs_that_merge_before_they_are_read_keep_theirs(make_generator):
    generator = make_generator()
    generator.engine.hold()
    prepared = await generator.prepare(
        GenerationRequest(prompt="Hi!", max_tokens=9, stop=("hi",), tokens=TokenWishes(logprobs=1))
    )
    async with generator.start(prepared) as stream:
        generator.engine.step(8)  # "defghijk", read as one output
        [delta] = [delta async for delta in stream]
    assert delta.text == "defg"
    assert delta.token_ids == tuple(b"defghi")
    assert delta.logprobs == tuple(fake_logprobs(i, 1) for i in b"defghi")


async def test_those_of_the_prompt_come_once_and_first(make_generator):
    deltas, last = await generate(
        make_generator(), max_tokens=3, tokens=TokenWishes(prompt_logprobs=1)
    )
    first, *others = [*deltas, last]
    assert first.prompt_logprobs == (None, fake_logprobs(ord("i"), 1), fake_logprobs(33, 1))
    assert all(delta.prompt_logprobs is None for delta in others)
    assert not any(delta.logprobs for delta in [first, *others])


@pytest.mark.parametrize("answer", ["", "abc"])
async def test_a_prompt_alone_generates_nothing(make_generator, answer):
    generator = make_generator()
    generator.engine.script("Hi!", answer)
    wishes = TokenWishes(logprobs=1, prompt_logprobs=1)
    deltas, last = await generate(generator, max_tokens=1, prompt_only=True, tokens=wishes)
    assert deltas == []
    assert (last.text, last.token_ids, last.logprobs) == ("", (), ())
    assert last.finish.reason == "length"
    assert last.finish.usage.completion_tokens == 0
    assert len(last.prompt_logprobs) == 3


async def test_a_dead_end_is_a_cut_with_its_reason(make_generator):
    generator = make_generator()
    generator.engine.hold()
    prepared = await generator.prepare(GenerationRequest(prompt="Hi!"))
    async with generator.start(prepared) as stream:
        generator.engine.step(2)
        generator.engine.end_all(EngineFinish.DEAD_END)
        [delta] = [delta async for delta in stream]
    assert (delta.text, delta.finish.reason) == ("de", "length")
    assert delta.finish.stop_reason == "dead_end"
