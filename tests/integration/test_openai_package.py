"""The stock `openai` package as a client that knows nothing of us."""

import asyncio

import openai
import pytest

from fakes import FakeEngine, fake_answer
from jaxengine.outputs import FinishReason

USER = {"role": "user", "content": "yo"}
NUM_PROMPT_TOKENS = 4 + len("user") + len("yo") + 11  # see ByteChatTemplate
ANSWER = fake_answer(NUM_PROMPT_TOKENS, 5)


@pytest.fixture
async def client_of():
    clients = []

    def make(gateway, **options):
        client = openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, **options
        )
        clients.append(client)
        return client

    yield make
    for client in clients:
        await client.close()


@pytest.fixture
def client(gateway, client_of):
    return client_of(gateway)


async def test_models(client):
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"


async def test_a_whole_chat_answer(client):
    answer = await client.chat.completions.create(model="tiny", messages=[USER], max_tokens=5)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == NUM_PROMPT_TOKENS
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_a_streamed_chat_answer(client):
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[USER],
        max_tokens=5,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    for index in range(2):
        choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert choices[0].delta.role == "assistant"
        assert "".join(choice.delta.content for choice in choices) == ANSWER
        assert choices[-1].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 10


async def test_the_accumulating_stream_helper(gateway, client):
    gateway.engine.script_all("ok")
    async with client.chat.completions.stream(
        model="tiny", messages=[USER], max_tokens=5
    ) as stream:
        answer = await stream.get_final_completion()
    assert answer.choices[0].message.content == "ok"


async def test_whole_and_streamed_completions(client):
    answer = await client.completions.create(model="tiny", prompt=["a", "bb"], max_tokens=3)
    assert [choice.text for choice in answer.choices] == ["bcd", "cde"]
    stream = await client.completions.create(model="tiny", prompt="a", max_tokens=3, stream=True)
    assert "".join([c.choices[0].text async for c in stream]) == "bcd"


async def test_keep_alive_comments_do_not_disturb(start_gateway, client_of):
    gateway = await start_gateway(sse_keep_alive_interval_s=0.001)
    gateway.engine.hold()
    stream = await client_of(gateway).completions.create(
        model="tiny", prompt="a", max_tokens=2, stream=True
    )
    text = ""
    async with gateway.session.get("/health"):  # a round trip, so that comments were sent
        gateway.engine.release()
    async for chunk in stream:
        text += chunk.choices[0].text
    assert text == "bc"


async def test_leaving_a_stream_aborts_the_request(gateway, client):
    gateway.engine.hold()
    stream = await client.completions.create(model="tiny", prompt="a", stream=True)
    gateway.engine.step()
    async for _ in stream:
        break
    await stream.close()
    await gateway.engine.wait_until_idle()
    assert gateway.engine.num_aborts == 1


async def test_each_refusal_is_the_error_class_that_it_should_be(start_gateway, client_of):
    gateway = await start_gateway(FakeEngine(max_model_len=40, max_num_queued_requests=1))
    chat = client_of(gateway).chat.completions
    with pytest.raises(openai.BadRequestError) as caught:
        await chat.create(model="tiny", messages=[USER], temperature=3000)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        await chat.create(model="tiny", messages=[USER], max_tokens=40)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as caught:
        await chat.create(model="other", messages=[USER])
    assert caught.value.code == "model_not_found"
    gateway.engine.hold()
    with pytest.raises(openai.RateLimitError):
        await chat.create(model="tiny", messages=[USER], n=2)
    gateway.engine.die()
    with pytest.raises(openai.InternalServerError) as caught:
        await chat.create(model="tiny", messages=[USER])
    assert caught.value.status_code == 503


async def test_fields_of_ours_pass_as_extra_body_and_the_key_is_the_tenant(gateway, client):
    fields = {"priority": -7, "queue_timeout": 1.5, "deadline": 60}
    await client.chat.completions.create(
        model="tiny", messages=[USER], max_tokens=1, extra_body=fields
    )
    [request] = gateway.engine.requests
    assert (request.priority, request.queue_timeout_s, request.deadline_s) == (-7, 1.5, 60)
    assert request.tenant == "140bedbf9c3f6d56"  # printf %s none | sha256sum


async def test_a_deadline_that_has_passed_is_not_tried_again(gateway, client):
    gateway.engine.hold()
    chat = client.with_options(max_retries=2).chat.completions
    task = asyncio.create_task(chat.create(model="tiny", messages=[USER]))
    await gateway.engine.wait_for_requests(1)
    gateway.engine.expire(FinishReason.DEADLINE)
    with pytest.raises(openai.RateLimitError) as caught:
        await task
    assert caught.value.code == "deadline_exceeded"
    assert len(gateway.engine.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_without_room_it_tries_again_after_the_time_that_we_say(
    gateway, client, stream, monkeypatch
):
    slept_s = []

    async def sleep(seconds):
        slept_s.append(seconds)
        if len(slept_s) == 2:  # there is room now
            gateway.engine._refusal = None

    monkeypatch.setattr("anyio.sleep", sleep)
    gateway.engine.refuse("queued_requests", retry_after_s=6.2)
    chat = client.with_options(max_retries=2).chat.completions
    answer = await chat.create(model="tiny", messages=[USER], max_tokens=5, stream=stream)
    if stream:
        texts = [chunk.choices[0].delta.content or "" async for chunk in answer]
        assert "".join(texts) == ANSWER
    else:
        assert answer.choices[0].message.content == ANSWER
    assert slept_s == [7.0, 7.0]  # Retry-After has whole seconds


async def test_while_we_stop_it_tries_again_and_then_says_so(start_gateway, client_of, monkeypatch):
    slept_s = []

    async def sleep(seconds):
        slept_s.append(seconds)

    monkeypatch.setattr("anyio.sleep", sleep)
    gateway = await start_gateway()
    gateway.engine.is_ready = False
    client = client_of(gateway).with_options(max_retries=2)
    with pytest.raises(openai.InternalServerError) as caught:
        await client.completions.create(model="tiny", prompt="a")
    assert (caught.value.status_code, caught.value.code) == (503, "not_ready")
    assert slept_s == [5.0, 5.0]


async def test_a_failure_in_mid_stream_is_raised(gateway, client):
    gateway.engine.hold()
    stream = await client.completions.create(model="tiny", prompt="a", stream=True)
    gateway.engine.step()
    assert (await anext(stream)).choices[0].text == "b"
    gateway.engine.fail_requests()
    with pytest.raises(openai.APIError, match="the step failed"):
        await anext(stream)


async def test_log_probabilities_of_both_endpoints(client):
    chat = await client.chat.completions.create(
        model="tiny", messages=[USER], max_tokens=2, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == ANSWER[:2]
    assert [len(entry.top_logprobs) for entry in content] == [2, 2]
    assert bytes(content[0].bytes).decode() == ANSWER[0]
    text = await client.completions.create(
        model="tiny", prompt="Hi!", max_tokens=2, logprobs=1, echo=True
    )
    told = text.choices[0].logprobs
    assert text.choices[0].text == "Hi!de"
    assert told.tokens == ["H", "i", "!", "d", "e"]
    assert told.token_logprobs[0] is None
    assert told.text_offset == [0, 1, 2, 3, 4]


async def test_penalties_biases_and_a_format_are_taken(gateway, client):
    await client.chat.completions.create(
        model="tiny",
        messages=[USER],
        max_tokens=2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"65": 1},
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
        extra_body={"repetition_penalty": 1.1, "bad_words": ["x"]},
    )
    [(_, params)] = gateway.engine.submitted
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert (params.repetition_penalty, params.logit_bias) == (1.1, ((65, 1.0),))
    assert params.bad_words == ((120,), (32, 120))
    assert params.grammar is not None
