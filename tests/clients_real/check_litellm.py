"""`litellm`, with its names for servers like this one."""

import asyncio
import os

from checks import Checks, refused

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch prices

import litellm

checks = Checks("litellm", "openai")
BASE = f"{checks.url}/v1"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
ASK = {
    "messages": MESSAGES,
    "api_base": BASE,
    "api_key": "none",
    "temperature": 0,
    "max_tokens": 24,
}
litellm.suppress_debug_info = True


def ask(provider, **more):
    return litellm.completion(model=f"{provider}/{checks.model}", **{**ASK, **more})


@checks.add()
def whole():
    """An answer through hosted_vllm/ and openai/"""
    for provider in ("hosted_vllm", "openai"):
        answer = ask(provider)
        assert checks.is_answer(answer.choices[0].message.content)
        assert answer.usage.completion_tokens > 0


@checks.add()
def streamed():
    """A stream, with the usage that was asked for"""
    for provider in ("hosted_vllm", "openai"):
        chunks = list(ask(provider, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert checks.is_answer(text)
        assert any(getattr(chunk, "usage", None) for chunk in chunks)


@checks.add()
def rebuilt():
    """Its stream builder rebuilds the whole answer"""
    chunks = list(ask("hosted_vllm", stream=True))
    assert checks.is_answer(litellm.stream_chunk_builder(chunks).choices[0].message.content)


@checks.add()
def asynchronous():
    """Eight answers at a time, asynchronously"""

    async def all_of_them():
        calls = (litellm.acompletion(model=f"hosted_vllm/{checks.model}", **ASK) for _ in range(8))
        return await asyncio.gather(*calls)

    answers = asyncio.run(all_of_them())
    assert len({answer.choices[0].message.content for answer in answers}) == 1


@checks.add()
def text_completion():
    """A text completion"""
    answer = litellm.text_completion(
        model=f"text-completion-openai/{checks.model}",
        prompt="One, two, three,",
        api_base=BASE,
        api_key="none",
        max_tokens=4,
    )
    assert answer.choices[0].text


@checks.add()
def errors():
    """Errors come as its exceptions"""
    other = {"model": "hosted_vllm/other", **ASK}
    refused(litellm.NotFoundError, lambda: litellm.completion(**other))
    refused(litellm.BadRequestError, lambda: ask("hosted_vllm", max_tokens=10**6))


checks.run()
