from dataclasses import replace

import pytest

from fakes import BOS, IM_START, FakeEngine
from gateway.errors import InvalidRequest, Overloaded, Unavailable
from gateway.generation import ChatMessage, GenerationRequest
from generating import counted, generate, joined
from jaxengine.outputs import FinishReason as EngineFinish


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
        cache_salt="salt",
        tenant="alice",
        priority=-(2**31),
        queue_timeout_s=0.5,
        deadline_s=86_400,
    )
    [(_, params)] = generator.engine.submitted
    assert (params.max_tokens, params.min_tokens, params.temperature) == (2, 1, 0.5)
    assert (params.top_k, params.top_p, params.min_p, params.seed) == (4, 0.25, 0.125, -7)
    [request] = generator.engine.requests
    assert (request.cache_salt, request.tenant) == ("salt", "alice")
    assert (request.priority, request.queue_timeout_s) == (-(2**31), 0.5)
    assert request.deadline_s == 86_400


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
        ({"priority": 2**31}, "priority"),
        ({"priority": -(2**31) - 1}, "priority"),
        ({"priority": 10**30}, "priority"),
        ({"queue_timeout_s": 0.0}, "queue_timeout"),
        ({"queue_timeout_s": -1.0}, "queue_timeout"),
        ({"queue_timeout_s": 86_401.0}, "queue_timeout"),
        ({"queue_timeout_s": float("nan")}, "queue_timeout"),
        ({"deadline_s": 0}, "deadline"),
        ({"deadline_s": float("inf")}, "deadline"),
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


def rejected(generator, reason):
    return counted(
        generator, f'headrace_requests_rejected_total{{model_name="m",reason="{reason}"}}'
    )


@pytest.mark.parametrize("reason", ["queued_requests", "queued_tokens", "queue_timeout"])
async def test_a_full_queue_is_an_overload_with_its_reason_and_a_time_to_retry(
    make_generator, reason
):
    generator = make_generator()
    prepared = await generator.prepare(GenerationRequest(prompt="Hi!"))
    generator.engine.refuse(reason, retry_after_s=2.5)
    with pytest.raises(Overloaded) as caught:
        generator.start(prepared)
    assert (caught.value.code, caught.value.retry_after_s) == (reason, 2.5)
    assert rejected(generator, reason) == 1


async def test_a_full_queue_refuses_before_tokenizing(make_generator):
    generator = make_generator(FakeEngine(max_num_queued_requests=1))
    generator.engine.hold()
    prepared = await generator.prepare(GenerationRequest(prompt="Hi!"))
    async with generator.start(prepared):
        preparing = generator.prepare(GenerationRequest(prompt="Hi!"))
        with pytest.raises(Overloaded):
            preparing.send(None)  # else it would wait here for a thread that tokenizes
    assert rejected(generator, "queued_requests") == 1


async def test_room_can_be_asked_for_many_at_once(make_generator):
    generator = make_generator(FakeEngine(max_num_queued_requests=2))
    generator.check_capacity(2, like=GenerationRequest(prompt=""))
    with pytest.raises(Overloaded):
        generator.check_capacity(3, like=GenerationRequest(prompt=""))
    assert rejected(generator, "queued_requests") == 1


async def test_a_queue_may_be_full_for_one_tenant_only(make_generator):
    generator = make_generator()
    generator.engine.full_for = {"alice"}
    with pytest.raises(Overloaded):
        generator.check_capacity(1, like=GenerationRequest(prompt="", tenant="alice"))
    with pytest.raises(Overloaded):
        await generator.prepare(GenerationRequest(prompt="Hi!", tenant="alice"))
    await generator.prepare(GenerationRequest(prompt="Hi!", tenant="bob"))


async def test_many_start_together_or_not_at_all(make_generator):
    generator = make_generator(FakeEngine(max_num_queued_requests=2))
    generator.engine.hold()
    prepared = await generator.prepare(GenerationRequest(prompt="Hi!"))
    with pytest.raises(Overloaded):
        generator.start_all([prepared] * 3)
    assert generator.engine.submitted == []
    first, second = generator.start_all([prepared] * 2)
    async with first, second:
        assert generator.engine.num_active == 2


async def ended(generator, reason, *, num_tokens=0):
    """Return the finish of a request that its time ended after so many tokens."""
    generator.engine.hold()
    prepared = await generator.prepare(GenerationRequest(prompt="Hi!"))
    async with generator.start(prepared) as stream:
        generator.engine.step(num_tokens)
        generator.engine.expire(reason)
        [delta] = [delta async for delta in stream]
    return delta.finish


async def test_a_request_that_never_started_is_an_overload(make_generator):
    generator = make_generator(FakeEngine(max_num_seqs=1))
    async with generator.start(await generator.prepare(GenerationRequest(prompt="x"))):
        generator.engine.hold()
        generator.engine.step(150)
        failure = generator.failure(await ended(generator, EngineFinish.QUEUE_TIMEOUT))
    assert isinstance(failure, Overloaded)
    assert failure.code == "queue_timeout"


async def test_its_own_wait_says_when_to_come_again(make_generator):
    generator = make_generator()
    finish = await ended(generator, EngineFinish.QUEUE_TIMEOUT)
    for queue_s, retry_after_s in ((4.5, 4.5), (3600.0, 60.0)):
        waited = replace(finish, timing=replace(finish.timing, queue_s=queue_s))
        assert generator.failure(waited).retry_after_s == retry_after_s


async def test_a_deadline_before_the_first_token_is_a_failure_and_after_it_is_none(make_generator):
    generator = make_generator()
    failure = generator.failure(await ended(generator, EngineFinish.DEADLINE))
    assert (failure.status, failure.code) == (429, "deadline_exceeded")
    assert generator.failure(await ended(generator, EngineFinish.DEADLINE, num_tokens=1)) is None


async def test_a_failed_step_is_our_fault_until_the_engine_is_gone(make_generator):
    generator = make_generator()
    failed = replace(
        await ended(generator, EngineFinish.DEADLINE), reason="error", error="the step failed"
    )
    assert generator.failure(failed).status == 500
    generator.engine.is_ready = False
    failure = generator.failure(failed)
    assert (failure.status, failure.code, failure.retry_after_s) == (503, "shutting_down", 5)
    generator.engine.die()
    failure = generator.failure(failed)
    assert (failure.status, failure.code) == (503, "engine_dead")
    assert failure.message == "the step failed"


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


async def test_special_tokens_show_where_they_are_wanted(make_generator):
    generator = make_generator()
    generator.engine.script_all([IM_START, ord("a"), BOS])
    for visible, text in (((), "a"), (("<|im_start|>", "no token"), "<|im_start|>a")):
        deltas, last = await generate(generator, visible_tokens=visible)
        assert joined(deltas, last) == text


async def test_tools_are_for_conversations_and_count_as_part_of_them(make_generator):
    generator = make_generator(FakeEngine(max_model_len=200))
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 300}}
    messages = (ChatMessage(role="user", content="Hi"),)
    with pytest.raises(InvalidRequest) as caught:
        await generator.prepare(GenerationRequest(prompt=messages, tools=(tool,)))
    assert (caught.value.param, caught.value.code) == ("tools", "context_length_exceeded")
