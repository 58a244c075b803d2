"""POST /v1/completions: a text, several texts, or token ids to be continued."""

from collections import defaultdict
from collections.abc import Sequence

from aiohttp import web

from gateway.app_keys import CONFIG, GENERATOR
from gateway.callers import caller_of
from gateway.errors import InvalidRequest
from gateway.generation import TextFinish
from gateway.json_body import convert, read_object
from gateway.openai.answers import send_answer
from gateway.openai.details import DetailOptions, prompt_text
from gateway.openai.protocol import CompletionBody, CompletionChoice, StreamOptions
from gateway.openai.sampling import (
    check_model,
    generation_requests,
    num_choices,
    prepare_all,
    wire_finish,
    wire_stop_reason,
    with_choice_seeds,
)
from gateway.openai.unsupported import COMPLETION_FIELDS, refuse_unsupported
from gateway.prompts import Prompt

__all__ = ["completions"]


async def completions(request: web.Request) -> web.StreamResponse:
    """Handle POST /v1/completions."""
    raw = await read_object(request)
    body = convert(raw, CompletionBody)
    config = request.app[CONFIG]
    model = check_model(body.model, config)
    refuse_unsupported(raw, COMPLETION_FIELDS)
    prompts = _prompts(body.prompt)
    n = num_choices(body, len(prompts), config)
    generator = request.app[GENERATOR]
    requests = generation_requests(
        body,
        prompts,
        max_tokens=body.max_tokens,
        caller=caller_of(request),
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        echo=bool(body.echo),
    )
    prepared = await prepare_all(generator, requests, n=n)
    choices = [choice for p in prepared for choice in with_choice_seeds(p, n)]
    texts = [prompt_text(p, generator.tokenizer) for p in choices] if body.echo else []
    return await send_answer(
        request,
        choices,
        n=n,
        model=model,
        stream_options=(body.stream_options or StreamOptions()) if body.stream else None,
        answer_format=CompletionFormat(texts),
        details=DetailOptions(
            logprobs=None if body.logprobs is None else "completion",
            num_top=body.logprobs,
            prompt_logprobs=body.prompt_logprobs,
            echo=bool(body.echo),
            token_ids=bool(body.return_token_ids),
            names_are_ids=bool(body.return_tokens_as_token_ids),
        ),
    )


def _prompts(prompt: str | list[str | int | list[int]]) -> list[Prompt]:
    """Tell apart the four forms that a prompt may have.

    Raises:
        InvalidRequest: an empty list, or a mixture.
    """
    if isinstance(prompt, str):
        return [prompt]
    texts = [part for part in prompt if isinstance(part, str)]
    ids = [part for part in prompt if isinstance(part, int)]
    lists = [tuple(part) for part in prompt if isinstance(part, list)]
    match bool(texts), bool(ids), bool(lists):
        case True, False, False:
            return [*texts]
        case False, True, False:
            return [tuple(ids)]
        case False, False, True:
            return [*lists]
        case False, False, False:
            raise InvalidRequest("prompt must not be empty", param="prompt")
        case _:
            raise InvalidRequest(
                "prompt must be text, a list of texts, a list of token ids, "
                "or a list of such lists, and no mixture",
                param="prompt",
            )


class CompletionFormat:
    """Choices with their text in `text`, whole or streamed.

    Args:
        prompts: what comes before the text of each choice; empty if the prompt is not wanted.
    """

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, prompts: Sequence[str] = ()) -> None:
        self._prompts = dict(enumerate(prompts))  # those not told yet
        self._held: defaultdict[int, list[str]] = defaultdict(list)

    def opening(self, index: int) -> None:
        return None

    def text(self, index: int, text: str) -> list[CompletionChoice]:
        return [CompletionChoice(index=index, text=self._prompts.pop(index, "") + text)]

    def finish(self, index: int, finish: TextFinish) -> list[CompletionChoice]:
        """Return the end, after the prompt if there was no text to come with it."""
        prompt = self.text(index, "") if index in self._prompts else []
        return [*prompt, self._end("", index, finish)]

    def is_plain(self, index: int) -> bool:
        return index not in self._prompts

    def hold(self, index: int, text: str) -> None:
        self._held[index].append(text)

    def whole(self, index: int, finish: TextFinish) -> CompletionChoice:
        text = "".join(self._held[index])
        return self._end(self._prompts.pop(index, "") + text, index, finish)

    def _end(self, text: str, index: int, finish: TextFinish) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=text,
            finish_reason=wire_finish(finish),
            stop_reason=wire_stop_reason(finish),
            timing=finish.timing,
        )

    def reasoning_tokens(self, index: int, token_ids: Sequence[int]) -> int:
        return 0
