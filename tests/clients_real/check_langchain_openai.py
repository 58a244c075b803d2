"""`langchain-openai`, which sends explicit nulls."""

import asyncio

from checks import Checks
from langchain_openai import ChatOpenAI, OpenAI

checks = Checks("langchain-openai", "langchain-core", "openai")
BASE = f"{checks.url}/v1"
QUESTION = "What is the capital of France?"


def chat(**more):
    return ChatOpenAI(
        base_url=BASE, api_key="none", model=checks.model, temperature=0, max_tokens=24, **more
    )


@checks.add()
def invoke():
    """An answer with token counts"""
    answer = chat().invoke(QUESTION)
    assert checks.is_answer(answer.content)
    assert answer.usage_metadata["total_tokens"] > 0


@checks.add()
def conversation():
    """A conversation with a system message"""
    answer = chat().invoke([("system", "You answer in one word."), ("human", QUESTION)])
    assert answer.content


@checks.add()
def streamed():
    """A stream, with usage"""
    chunks = list(chat(stream_usage=True).stream(QUESTION))
    assert checks.is_answer("".join(chunk.content for chunk in chunks))
    assert any(chunk.usage_metadata for chunk in chunks)


@checks.add()
def batch():
    """Eight questions at a time"""
    answers = chat().batch([QUESTION] * 8)
    assert len({answer.content for answer in answers}) == 1


@checks.add()
def asynchronous():
    """Asynchronously, whole and streamed"""

    async def both():
        whole = await chat().ainvoke(QUESTION)
        return whole.content, "".join([chunk.content async for chunk in chat().astream(QUESTION)])

    whole, streamed_text = asyncio.run(both())
    assert whole == streamed_text


@checks.add()
def completion():
    """The completion model"""
    llm = OpenAI(base_url=BASE, api_key="none", model=checks.model, max_tokens=4, temperature=0)
    assert llm.invoke("One, two, three,")


@checks.add(needs="response_format")
def structured():
    """Structured output from a JSON schema"""
    schema = {
        "title": "Answer",
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    model = ChatOpenAI(base_url=BASE, api_key="none", model=checks.model, temperature=0)
    answer = model.with_structured_output(schema, method="json_schema").invoke(QUESTION)
    assert list(answer) == ["city"]


checks.run()
