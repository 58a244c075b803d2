import pytest

from fakes import FakeEngine
from gateway.errors import InvalidRequest, Overloaded, Unavailable
from gateway.generation import ChatMessage, GenerationRequest
from generating import counted, generate


async def test_max_tokens_defaults_to_what_the_context_leaves(make_generator):
    generator = make_generator(FakeEngine(max_model_len=10))
    _, last = await generate(generator, "1234567")
    assert last.finish.usage.completion_tokens == 3


async def test_sampling_fields_reach_the_engine(make_generator):
    generator = make_generator()
    await generate(
        generator,
        max_tokens=2,
        min_tokens=1,
        temperature=0.5,
        top_k=4,
        top_p=0.25,
        min_p=0.125,
        seed=-7,
        cache_salt="tenant",
    )
    [(_, params)] = generator.engine.submitted
    assert (params.max_tokens, params.min_tokens, params.temperature) == (2, 1, 0.5)
    assert (params.top_k, params.top_p, params.min_p, params.seed) == (4, 0.25, 0.125, -7)
    assert generator.engine.requests[0].cache_salt == "tenant"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 999999}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": -1}, "top_p"),
        ({"top_p": float("inf")}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x",) * 17}, "stop"),
        ({"stop": ("x" * 1025,)}, "stop"),
        ({"stop_token_ids": (259,)}, "stop_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"stop_token_ids": tuple(range(17))}, "stop_token_ids"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"prompt": ()}, "prompt"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(make_generator, fields, param):
    generator = make_generator()
    with pytest.raises(InvalidRequest) as caught:
        await generator.prepare(GenerationRequest(**{"prompt": "Hi!", **fields}))
    assert caught.value.param == param
    assert generator.engine.submitted == []


async def test_a_prompt_that_leaves_no_room_names_both_numbers(make_generator):
    generator = make_generator(FakeEngine(max_model_len=10))
    with pytest.raises(InvalidRequest) as caught:
        await generator.prepare(GenerationRequest(prompt="x" * 10))
    assert caught.value.code == "context_length_exceeded"
    assert "10 tokens" in caught.value.message
    assert "at most 9" in caught.value.message


async def test_max_tokens_beyond_the_context_names_all_three_numbers(make_generator):
    generator = make_generator(FakeEngine(max_model_len=10))
    with pytest.raises(InvalidRequest) as caught:
        await generator.prepare(GenerationRequest(prompt="12345", max_tokens=6))
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")
    assert all(number in caught.value.message for number in ("5", "6", "10"))
    await generator.prepare(GenerationRequest(prompt="12345", max_tokens=5))


async def test_a_conversation_is_rendered(make_generator):
    generator = make_generator()
    prepared = await generator.prepare(
        GenerationRequest(prompt=(ChatMessage(role="user", content="yo"),))
    )
    assert len(prepared.prompt_token_ids) == 4 + len("user") + len("yo") + 11


async def test_a_full_queue_is_an_overload_with_a_time_to_retry(make_generator):
    generator = make_generator(FakeEngine(max_num_queued_requests=1))
    generator.engine.hold()
    prepared = await generator.prepare(GenerationRequest(prompt="Hi!"))
    async with generator.start(prepared):
        with pytest.raises(Overloaded) as caught:
            generator.start(prepared)
    assert caught.value.retry_after_s == 3.0
    rejected = 'headrace_requests_rejected_total{model_name="m",reason="overloaded"}'
    assert counted(generator, rejected) == 1


async def test_an_engine_that_is_not_ready_refuses_before_tokenizing(make_generator):
    generator = make_generator()
    generator.engine.is_ready = False
    with pytest.raises(Unavailable):
        await generator.prepare(GenerationRequest(prompt="Hi!"))


async def test_an_engine_that_dies_in_between_refuses_at_the_start(make_generator):
    generator = make_generator()
    prepared = await generator.prepare(GenerationRequest(prompt="Hi!"))
    generator.engine.die()
    with pytest.raises(Unavailable) as caught:
        generator.start(prepared)
    assert caught.value.code == "engine_dead"
