"""The stock `openai` package."""

import asyncio
import json

import openai
from checks import Checks, refused

checks = Checks("openai")
BASE = f"{checks.url}/v1"
client = openai.OpenAI(base_url=BASE, api_key="none")
QUESTION = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": QUESTION}]
ASK = {"model": checks.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}


@checks.add()
def models():
    """Models are listed and retrieved"""
    assert [model.id for model in client.models.list()] == [checks.model]
    assert client.models.retrieve(checks.model).id == checks.model


@checks.add()
def whole():
    """A chat answer, whole"""
    answer = client.chat.completions.create(**ASK)
    assert checks.is_answer(answer.choices[0].message.content)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@checks.add()
def streamed():
    """A chat answer, streamed, with usage"""
    chunks = list(
        client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == client.chat.completions.create(**ASK).choices[0].message.content
    assert chunks[-1].usage.completion_tokens > 0


@checks.add()
def helper():
    """The stream helper collects the same answer"""
    with client.chat.completions.stream(**ASK) as stream:
        for _ in stream:
            pass
        # `get_final_completion` takes an answer that was cut for none.
        answer = stream.current_completion_snapshot
    assert checks.is_answer(answer.choices[0].message.content)


@checks.add()
def completions():
    """Completions of several prompts with several choices"""
    answer = client.completions.create(
        model=checks.model, prompt=["One, two,", "A, B,"], n=2, max_tokens=4, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


@checks.add()
def concurrent():
    """Sixteen streams at a time, asynchronously"""

    async def one(asynchronous):
        stream = await asynchronous.chat.completions.create(**ASK, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=BASE, api_key="none") as asynchronous:
            return await asyncio.gather(*(one(asynchronous) for _ in range(16)))

    assert len(set(asyncio.run(all_of_them()))) == 1


@checks.add()
def leaving():
    """A stream that is closed early leaves the connection usable"""
    stream = client.chat.completions.create(**{**ASK, "max_tokens": 200}, stream=True)
    next(iter(stream))
    stream.close()
    assert client.models.list().data


@checks.add()
def errors():
    """Errors come as its exceptions, with code and param"""

    def asking(**changed):
        return lambda: client.chat.completions.create(**{**ASK, **changed})

    error = refused(openai.NotFoundError, asking(model="other"))
    assert error.code == "model_not_found"
    error = refused(openai.BadRequestError, asking(temperature=-1))
    assert error.param == "temperature"
    error = refused(openai.BadRequestError, asking(max_tokens=10**6))
    assert error.code == "context_length_exceeded"


@checks.add(needs="logprobs")
def logprobs():
    """Logprobs of the chat"""
    answer = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens or content
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in content)


@checks.add(needs="response_format")
def structured():
    """An answer in a JSON schema"""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        **{**ASK, "max_tokens": 64},
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        },
    )
    assert list(json.loads(answer.choices[0].message.content)) == ["city"]


@checks.add(needs="/v1/responses")
def responses():
    """Responses, whole and streamed"""
    ask = {"model": checks.model, "input": QUESTION, "temperature": 0, "max_output_tokens": 24}
    assert checks.is_answer(client.responses.create(**ask).output_text)
    events = list(client.responses.create(**ask, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert checks.is_answer(events[-1].response.output_text)


@checks.add(needs="/v1/responses")
def websocket():
    """Responses over a websocket, two lanes at a time"""

    async def both():
        async with openai.AsyncOpenAI(base_url=BASE, api_key="none") as asynchronous:
            texts = {"a": "", "b": ""}
            running = set(texts)
            async with asynchronous.responses.connect() as connection:
                for lane in texts:
                    await connection.response.create(
                        model=checks.model,
                        input=QUESTION,
                        temperature=0,
                        max_output_tokens=24,
                        stream_id=lane,
                    )
                async for event in connection:
                    if event.type == "response.output_text.delta":
                        texts[event.stream_id] += event.delta
                    elif event.type in ("response.completed", "response.incomplete"):
                        running.remove(event.stream_id)
                        if not running:
                            return texts

    texts = asyncio.run(both())
    assert checks.is_answer(texts["a"])
    assert texts["a"] == texts["b"]


@checks.add(needs="/v1/responses")
def input_items():
    """What a response was asked is listed"""
    response = client.responses.create(model=checks.model, input=QUESTION, max_output_tokens=1)
    [item] = client.responses.input_items.list(response.id)
    assert item.content[0].text == QUESTION


checks.run()
