"""The fakes are what other tests compute their expectations with, so they are tested as well."""

import pytest

from fakes import BOS, EOS, IM_START, STEP_S, ByteChatTemplate, FakeEngine, byte_tokenizer
from gateway.text_codec import ChatMessage
from jaxengine.errors import EngineDeadError, EngineStoppingError, QueueFullError
from jaxengine.outputs import FinishReason
from jaxengine.sampling_params import SamplingParams
from jaxengine.token_engine import TokenRequest


async def read(stream):
    async with stream:
        return [output async for output in stream]


def ask(engine, prompt, sampling):
    [stream] = engine.submit([TokenRequest(prompt_token_ids=prompt, params=sampling)])
    return stream


def params(**fields):
    return SamplingParams(**{"max_tokens": 3, **fields})


async def test_the_answer_to_a_prompt_of_three_tokens_starts_with_d():
    outputs = await read(ask(FakeEngine(), b"Hi!", params()))
    assert b"".join(bytes(output.new_token_ids) for output in outputs) == b"def"
    assert outputs[-1].finish_reason is FinishReason.LENGTH


async def test_a_script_ends_with_eos():
    engine = FakeEngine()
    engine.script("Hi!", "a")
    outputs = await read(ask(engine, b"Hi!", params()))
    assert sum((output.new_token_ids for output in outputs), ()) == (ord("a"), EOS)
    assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == (FinishReason.STOP, EOS)


async def test_the_gate_lets_exactly_the_asked_steps_through():
    engine = FakeEngine(max_num_seqs=1)
    engine.hold()
    first, second = ask(engine, b"a", params()), ask(engine, b"a", params())
    engine.step(2)
    assert engine.num_waiting == 1
    assert (await anext(first)).new_token_ids == (ord("b"), ord("c"))
    engine.step(2)
    assert (await anext(first)).finished
    output = await anext(second)
    assert output.queue_s == pytest.approx(3 * STEP_S)
    second.close()
    assert (engine.num_aborts, engine.num_active) == (1, 0)


async def test_refusals():
    engine = FakeEngine(max_num_queued_requests=1)
    engine.hold()
    engine.check_capacity(1)
    ask(engine, b"a", params())
    with pytest.raises(QueueFullError):
        ask(engine, b"a", params())
    with pytest.raises(QueueFullError):
        engine.check_capacity(1)
    await engine.stop(drain_timeout_s=0)
    assert engine.num_active == 0
    with pytest.raises(EngineStoppingError):
        ask(engine, b"a", params())
    engine.die()
    with pytest.raises(EngineDeadError):
        ask(engine, b"a", params())


async def test_a_refusal_says_its_reason_and_takes_nothing():
    engine = FakeEngine()
    engine.refuse("queued_tokens", retry_after_s=2.5)
    with pytest.raises(QueueFullError) as caught:
        ask(engine, b"a", params())
    assert (caught.value.reason, caught.value.retry_after_s) == ("queued_tokens", 2.5)
    assert engine.submitted == []


@pytest.mark.parametrize(
    ("reason", "ended"),
    [(FinishReason.QUEUE_TIMEOUT, [False, True]), (FinishReason.DEADLINE, [True, True])],
)
async def test_only_what_waits_can_have_waited_too_long(reason, ended):
    engine = FakeEngine(max_num_seqs=1)
    engine.hold()
    streams = [ask(engine, b"a", params()), ask(engine, b"a", params())]
    engine.step()
    engine.expire(reason)
    assert engine.num_active == ended.count(False)
    for stream, has_ended in zip(streams, ended, strict=True):
        if has_ended:
            assert (await anext(stream)).finish_reason is reason


def test_the_byte_tokenizer_knows_bytes_specials_and_words():
    tokenizer = byte_tokenizer("DEF")
    assert tokenizer.encode("é<s>") == [0xC3, 0xA9, *b"<s>"]
    assert tokenizer.encode("é<s>", parse_special=True, add_bos=True) == [BOS, 0xC3, 0xA9, BOS]
    assert tokenizer.decode([97, EOS, 259]) == "aDEF"
    assert tokenizer.decode([97, EOS], skip_special=False) == "a<|im_end|>"


def test_the_template_costs_what_its_docstring_says():
    ids = ByteChatTemplate().encode(byte_tokenizer(), [ChatMessage(role="user", content="yo")])
    assert ids == [IM_START, *b"user\nyo", EOS, ord("\n"), IM_START, *b"assistant\n"]
    assert len(ids) == 4 + len("user") + len("yo") + 11
