"""From the fields that both generating endpoints share to generation requests."""

import dataclasses
from collections.abc import Sequence

from gateway.callers import Caller
from gateway.config import GatewayConfig
from gateway.errors import InvalidRequest, ModelNotFound
from gateway.generation import (
    GenerationRequest,
    PreparedGeneration,
    TextFinish,
    TextGenerator,
)
from gateway.openai.protocol import SamplingBody, WireFinish
from gateway.openai.structure import structures_of_body
from gateway.prompts import Prompt

__all__ = [
    "check_model",
    "generation_requests",
    "num_choices",
    "prepare_all",
    "wire_finish",
    "wire_stop_reason",
    "with_choice_seeds",
]


def check_model(model: str | None, config: GatewayConfig) -> str:
    """Return the model name to answer with.

    Raises:
        ModelNotFound: the request names another model.
    """
    if model is None:
        return config.model_name
    if model not in config.served_model_names:
        raise ModelNotFound(model)
    return model


def num_choices(body: SamplingBody, num_prompts: int, config: GatewayConfig) -> int:
    """Return how many choices each prompt gets.

    Raises:
        InvalidRequest: too few or too many, for one prompt or for all together.
    """
    n = 1 if body.n is None else body.n
    if not 1 <= n <= config.max_n:
        raise InvalidRequest(f"n must be from 1 to {config.max_n}, got {n}", param="n")
    if n * num_prompts > config.max_choices:
        raise InvalidRequest(
            f"{num_prompts} prompts with {n} choices each are {n * num_prompts} answers; "
            f"at most {config.max_choices} are allowed",
            param="prompt" if n == 1 else "n",
        )
    return n


def generation_requests(
    body: SamplingBody,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int | None,
    caller: Caller,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    echo: bool = False,
) -> list[GenerationRequest]:
    """Return one request per prompt; what is null takes its default.

    Args:
        body: the fields.
        prompts: the prompts, taken from the body.
        max_tokens: the field of this endpoint.
        caller: who is asking.
        logprobs: alternatives to tell with each generated token; None to tell nothing.
        prompt_logprobs: the same of each token of the prompt.
        echo: whether the prompt is told too, and its log-probabilities if any are wanted.

    Raises:
        InvalidRequest: stream_options without a stream, prompt_logprobs with one, or a tenant
            that cannot be one.
        Forbidden: a tenant that is not the caller's.
    """
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    if prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs are not told in a stream", param="prompt_logprobs")
    prompt_only = echo and max_tokens == 0
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    template = GenerationRequest(
        prompt="",
        max_tokens=1 if prompt_only else max_tokens,
        prompt_only=prompt_only,
        tokens=body.wishes(
            logprobs=logprobs,
            prompt_logprobs=_more(prompt_logprobs, logprobs if echo else None),
            structures=structures_of_body(body),
        ),
        min_tokens=body.min_tokens or 0,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=0 if body.top_k in (None, -1) else body.top_k,  # -1 is what vLLM's clients send
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=0.0 if body.min_p is None else body.min_p,
        seed=body.seed,
        stop=tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        cache_salt=body.cache_salt,
        tenant=caller.tenant_of(body.tenant),
        account=caller.account,
        priority=body.priority or 0,
        queue_timeout_s=body.queue_timeout,
        deadline_s=body.deadline,
    )
    return [dataclasses.replace(template, prompt=prompt) for prompt in prompts]


def _more(first: int | None, second: int | None) -> int | None:
    """The number of alternatives that is enough for both wishes."""
    return second if first is None else first if second is None else max(first, second)


async def prepare_all(
    generator: TextGenerator, requests: Sequence[GenerationRequest], *, n: int
) -> list[PreparedGeneration]:
    """Prepare one after the other: a request with many prompts does not crowd out others.

    Nothing is tokenized if there is no room for n choices of each. All are of one tenant.
    """
    generator.check_capacity(n * len(requests), like=requests[0])
    return [await generator.prepare(request) for request in requests]


def with_choice_seeds(prepared: PreparedGeneration, n: int) -> list[PreparedGeneration]:
    """Return n copies; a given seed is counted up, or else all choices would be the same."""
    seed = prepared.params.seed
    if seed is None:
        return [prepared] * n
    return [
        dataclasses.replace(
            prepared,
            params=dataclasses.replace(prepared.params, seed=(seed + i) % 2**64 if i else seed),
        )
        for i in range(n)
    ]


def wire_finish(finish: TextFinish, *, has_calls: bool = False) -> WireFinish:
    """Return the finish_reason of a generation that did not fail."""
    if finish.reason in ("length", "deadline"):
        return "length"
    return "tool_calls" if has_calls else "stop"


def wire_stop_reason(finish: TextFinish) -> str | int | None:
    """Return what tells an end by deadline, a "length" for OpenAI's clients, from the others."""
    return "deadline" if finish.reason == "deadline" else finish.stop_reason
