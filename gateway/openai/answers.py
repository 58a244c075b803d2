"""The answer to a generating request, whole or as server-sent events.

The order of a stream is the one that OpenAI's clients rely on: text chunks whose finish_reason is
null, then for each choice exactly one chunk that finishes it and adds no text, then the usage
chunk if asked for, then [DONE]. A failure is an error event, and then there is no [DONE]: what is
not complete must not look complete.
"""

import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from gateway.app_keys import CONFIG, GENERATOR, VERSION
from gateway.errors import GatewayError, InternalError
from gateway.generation import PreparedGeneration, TextDelta, TextFinish
from gateway.middleware import REQUEST_ID
from gateway.openai.choices import merged_deltas, open_streams
from gateway.openai.details import ChoiceDetails, DetailOptions
from gateway.openai.protocol import (
    AnyChoice,
    CompletionChoice,
    CompletionTokensDetails,
    Envelope,
    PromptTokensDetails,
    StreamOptions,
    UsageBody,
)
from gateway.sse import DONE, EventStream, event

__all__ = ["AnswerFormat", "send_answer"]

NO_DETAILS = DetailOptions()

logger = logging.getLogger(__name__)

type Deltas = AsyncGenerator[tuple[int, TextDelta] | None]


class AnswerFormat(Protocol):
    """How one endpoint spells its choices."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def opening(self, index: int) -> AnyChoice | None:
        """Return the choice of the chunk before the first text, if there is one."""
        ...

    def text(self, index: int, text: str) -> Sequence[AnyChoice]:
        """Return the choices of the chunks that this text makes; none while it is held back."""
        ...

    def finish(self, index: int, finish: TextFinish) -> Sequence[AnyChoice]:
        """Return the choices of the last chunks, of which the last one adds nothing but the end."""
        ...

    def hold(self, index: int, text: str) -> None:
        """Take in text of an answer that is told as a whole."""
        ...

    def whole(self, index: int, finish: TextFinish) -> AnyChoice:
        """Return the choice with all that was held."""
        ...

    def reasoning_tokens(self, index: int, token_ids: Sequence[int]) -> int:
        """Return how many of the next tokens of a choice are thoughts before the answer."""
        ...


async def send_answer(
    request: web.Request,
    prepared: Sequence[PreparedGeneration],
    *,
    n: int,
    model: str,
    stream_options: StreamOptions | None,
    answer_format: AnswerFormat,
    details: DetailOptions = NO_DETAILS,
) -> web.StreamResponse:
    """Generate and answer.

    `prepared` has all choices: n of the first prompt, n of the second, and so on.
    `stream_options` is None for a whole answer.

    Raises:
        gateway.errors.GatewayError: the engine refused, or, for a whole answer, failed.
    """
    answer = _Answer(
        request, prepared, n=n, model=model, answer_format=answer_format, details=details
    )
    if stream_options is None:
        return await answer.whole()
    return await answer.streamed(stream_options)


class _Answer:
    """What one HTTP request is told."""

    def __init__(
        self,
        request: web.Request,
        prepared: Sequence[PreparedGeneration],
        *,
        n: int,
        model: str,
        answer_format: AnswerFormat,
        details: DetailOptions,
    ) -> None:
        self._request = request
        self._generator = request.app[GENERATOR]
        self._prepared = prepared
        self._model = model
        self._format = answer_format
        self._id = f"{answer_format.id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._fingerprint = f"headrace-{request.app[VERSION]}"
        self._usage = _UsageCount(prepared, n)
        tokenizer = self._generator.tokenizer
        self._details = [ChoiceDetails(details, p, tokenizer) for p in prepared]

    async def whole(self) -> web.Response:
        choices: dict[int, AnyChoice] = {}
        async with (
            open_streams(self._generator, self._prepared) as streams,
            aclosing(merged_deltas(streams)) as deltas,
        ):
            async for item in deltas:
                if item is None:
                    continue
                index, delta = item
                if delta.text:  # taken apart as it comes: at the end it would hold up all others
                    self._format.hold(index, delta.text)
                self._count(index, delta)
                if delta.finish is not None:
                    if (failure := self._generator.failure(delta.finish)) is not None:
                        raise failure
                    choice = self._format.whole(index, delta.finish)
                    choices[index] = self._details[index].attach(choice)
        body = self._envelope(
            self._format.object_name,
            *(choices[index] for index in range(len(self._prepared))),
            usage=self._usage.body(),
            system_fingerprint=self._fingerprint,
        )
        if not isinstance(choices[0], CompletionChoice):  # else each choice has them
            body = msgspec.structs.replace(body, prompt_logprobs=self._details[0].prompt_logprobs)
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def streamed(self, options: StreamOptions) -> web.StreamResponse:
        config = self._request.app[CONFIG]
        events = EventStream(self._request, send_timeout_s=config.send_timeout_s)
        async with open_streams(self._generator, self._prepared) as streams:
            deltas = merged_deltas(streams, idle_s=config.sse_keep_alive_interval_s)
            async with aclosing(deltas):
                with contextlib.suppress(ConnectionError):  # a client that leaves is a normal end
                    await events.open()
                    await self._send_stream(events, deltas, options)
                    await events.close()
        return events.response

    async def _send_stream(
        self, events: EventStream, deltas: Deltas, options: StreamOptions
    ) -> None:
        """Send everything, or what there is and then the error that came in between."""
        try:
            await self._send_deltas(events, deltas, options)
            await events.send(self._closing_events(options))
        except ConnectionError:
            raise
        except GatewayError as exc:
            await events.send([_error_event(exc)])
        except Exception:
            logger.exception("request %s: unexpected error", self._request.get(REQUEST_ID))
            await events.send([_error_event(InternalError())])

    async def _send_deltas(
        self, events: EventStream, deltas: Deltas, options: StreamOptions
    ) -> None:
        opened: set[int] = set()
        async for item in deltas:
            if item is None:
                await events.send_keep_alive()
                continue
            index, delta = item
            self._count(index, delta)
            choices: list[AnyChoice] = []
            chunks: list[bytes] = []
            failure = None if delta.finish is None else self._generator.failure(delta.finish)
            if index not in opened and (failure is None or delta.text):
                # Not before the first token: load tools take this chunk for it.
                opened.add(index)
                if (opening := self._format.opening(index)) is not None:
                    chunks.append(self._chunk(opening, options))
            if delta.text:
                choices.extend(self._format.text(index, delta.text))
            if delta.finish is not None and failure is None:
                choices.extend(self._format.finish(index, delta.finish))
            if choices:
                choices[0] = self._details[index].attach(choices[0])
            chunks += [self._chunk(choice, options) for choice in choices]
            if chunks:
                await events.send(chunks)
            if failure is not None:
                raise failure

    def _count(self, index: int, delta: TextDelta) -> None:
        self._usage.add(
            index,
            len(delta.token_ids),
            delta.finish,
            reasoning_tokens=self._format.reasoning_tokens(index, delta.token_ids),
        )
        self._details[index].add(delta)

    def _chunk(self, choice: AnyChoice, options: StreamOptions) -> bytes:
        usage: UsageBody | UnsetType | None = UNSET
        if options.continuous_usage_stats:
            usage = self._usage.body()
        elif options.include_usage:
            usage = None
        finished = choice.finish_reason is not None
        return self._event(
            choice, usage=usage, fingerprint=self._fingerprint if finished else UNSET
        )

    def _closing_events(self, options: StreamOptions) -> list[bytes]:
        if not options.include_usage:
            return [DONE]
        return [self._event(usage=self._usage.body(), fingerprint=self._fingerprint), DONE]

    def _event(
        self,
        *choices: AnyChoice,
        usage: UsageBody | UnsetType | None,
        fingerprint: str | UnsetType,
    ) -> bytes:
        envelope = self._envelope(
            self._format.chunk_object_name, *choices, usage=usage, system_fingerprint=fingerprint
        )
        return event(msgspec.json.encode(envelope))

    def _envelope(
        self,
        object_name: str,
        *choices: AnyChoice,
        usage: UsageBody | UnsetType | None,
        system_fingerprint: str | UnsetType,
    ) -> Envelope:
        return Envelope(
            id=self._id,
            object=object_name,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            system_fingerprint=system_fingerprint,
        )


class _UsageCount:
    """Tokens of all choices; a prompt counts once, however many choices it has."""

    def __init__(self, prepared: Sequence[PreparedGeneration], n: int) -> None:
        self._n = n
        self._prompt_tokens = sum(len(p.prompt_token_ids) for p in prepared[::n])
        self._completion_tokens = 0
        self._reasoning_tokens = 0
        self._cached_tokens = 0

    def add(
        self, index: int, num_tokens: int, finish: TextFinish | None, *, reasoning_tokens: int
    ) -> None:
        self._completion_tokens += num_tokens
        self._reasoning_tokens += reasoning_tokens
        # The other choices of a prompt may find what the first has just computed.
        if finish is not None and index % self._n == 0:
            self._cached_tokens += finish.usage.cached_tokens

    def body(self) -> UsageBody:
        return UsageBody(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=self._prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._cached_tokens),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=self._reasoning_tokens
            ),
        )


def _error_event(error: GatewayError) -> bytes:
    return event(msgspec.json.encode({"error": error.to_wire()}))
