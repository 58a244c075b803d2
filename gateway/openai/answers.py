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
from collections.abc import Sequence
from typing import Protocol

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from gateway.app_keys import CONFIG, GENERATOR, VERSION
from gateway.delta_reader import DeltaReader
from gateway.errors import GatewayError, InternalError
from gateway.generation import PreparedGeneration, TextDelta, TextFinish, TextStream
from gateway.middleware import REQUEST_ID
from gateway.openai.choices import open_streams
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
from gateway.silence import SilenceAlarm
from gateway.sse import DONE, EventStream, escape_line_ends, event

__all__ = ["AnswerFormat", "send_answer"]

NO_DETAILS = DetailOptions()

logger = logging.getLogger(__name__)


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

    def is_plain(self, index: int) -> bool:
        """Whether `text` would make one chunk of every text from now on, and that all alike."""
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
        self._text_frames: list[_TextFrame | None] = [None] * len(prepared)
        self._details = [ChoiceDetails(details, p, tokenizer) for p in prepared]

    async def whole(self) -> web.Response:
        choices: dict[int, AnyChoice] = {}

        def take_in(index: int, delta: TextDelta) -> bool:
            if delta.text:  # taken apart as it comes: at the end it would hold up all others
                self._format.hold(index, delta.text)
            self._count(index, delta)
            if delta.finish is not None:
                if (failure := self._generator.failure(delta.finish)) is not None:
                    raise failure
                choice = self._format.whole(index, delta.finish)
                choices[index] = self._details[index].attach(choice)
            return True

        async with open_streams(self._generator, self._prepared) as streams:
            await DeltaReader(streams, take_in).read()
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
            with contextlib.suppress(ConnectionError):  # a client that leaves is a normal end
                await events.open()
                await self._send_stream(events, streams, options)
                await events.close()
        return events.response

    async def _send_stream(
        self, events: EventStream, streams: Sequence[TextStream], options: StreamOptions
    ) -> None:
        """Send everything, or what there is and then the error that came in between."""
        try:
            await self._send_deltas(events, streams, options)
            await events.send(self._closing_events(options))
        except ConnectionError:
            raise
        except GatewayError as exc:
            await events.send([_error_event(exc)])
        except Exception:
            logger.exception("request %s: unexpected error", self._request.get(REQUEST_ID))
            await events.send([_error_event(InternalError())])

    async def _send_deltas(
        self, events: EventStream, streams: Sequence[TextStream], options: StreamOptions
    ) -> None:
        opened: set[int] = set()

        def send(index: int, delta: TextDelta) -> bool:
            alarm.reset()
            if delta.finish is None and (frame := self._text_frames[index]) is not None:
                self._count_tokens(index, delta)
                return events.put(frame.around(delta.text))
            failure = None if delta.finish is None else self._generator.failure(delta.finish)
            chunks: list[bytes] = []
            # Not before the first token: load tools take this chunk for it.
            if index not in opened and (failure is None or delta.text):
                opened.add(index)
                if (opening := self._format.opening(index)) is not None:
                    chunks.append(self._chunk(opening, options))
            chunks += self._chunks(index, delta, options, failed=failure is not None)
            has_room = not chunks or events.put(b"".join(chunks))
            if failure is not None:
                raise failure
            if delta.finish is None:
                self._text_frames[index] = self._text_frame(index, options)
            return has_room

        reader = DeltaReader(streams, send)
        silence_s = self._request.app[CONFIG].sse_keep_alive_interval_s
        with contextlib.closing(SilenceAlarm(silence_s, reader.interrupt)) as alarm:
            while not reader.has_ended:
                await reader.read()
                await events.make_room()
                if alarm.is_due:
                    alarm.reset()
                    await events.send_keep_alive()

    def _chunks(
        self, index: int, delta: TextDelta, options: StreamOptions, *, failed: bool
    ) -> list[bytes]:
        """Return what tells a delta; of one that failed, what there is before the failure."""
        self._count(index, delta)
        choices: list[AnyChoice] = []
        if delta.text:
            choices.extend(self._format.text(index, delta.text))
        if delta.finish is not None and not failed:
            choices.extend(self._format.finish(index, delta.finish))
        if choices:
            choices[0] = self._details[index].attach(choices[0])
        return [self._chunk(choice, options) for choice in choices]

    def _count(self, index: int, delta: TextDelta) -> None:
        self._count_tokens(index, delta)
        self._details[index].add(delta)

    def _count_tokens(self, index: int, delta: TextDelta) -> None:
        self._usage.add(index, delta, self._format.reasoning_tokens(index, delta.token_ids))

    def _text_frame(self, index: int, options: StreamOptions) -> "_TextFrame | None":
        """Return what is around the next texts of a choice, if that is always the same."""
        if (
            self._details[index].is_asking
            or options.continuous_usage_stats
            or not self._format.is_plain(index)
        ):
            return None
        mark = uuid.uuid4().hex
        [choice] = self._format.text(index, mark)
        return _TextFrame(self._chunk(choice, options), mark)

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


class _TextFrame:
    """A chunk that adds nothing but text, made once: to encode the rest again costs ten times more.

    Args:
        chunk: one whose text is `mark`, which is nowhere else in it.
    """

    def __init__(self, chunk: bytes, mark: str) -> None:
        self._head, self._tail = chunk.split(b'"%b"' % mark.encode())
        self._encode = msgspec.json.Encoder().encode

    def around(self, text: str) -> bytes:
        return b"%b%b%b" % (self._head, escape_line_ends(self._encode(text)), self._tail)


class _UsageCount:
    """Tokens of all choices; a prompt counts once, however many choices it has."""

    def __init__(self, prepared: Sequence[PreparedGeneration], n: int) -> None:
        self._n = n
        self._prompt_tokens = sum(len(p.prompt_token_ids) for p in prepared[::n])
        self._completion_tokens = 0
        self._reasoning_tokens = 0
        self._cached_tokens = 0

    def add(self, index: int, delta: TextDelta, reasoning_tokens: int) -> None:
        self._completion_tokens += len(delta.token_ids)
        self._reasoning_tokens += reasoning_tokens
        # The other choices of a prompt may find what the first has just computed.
        if delta.finish is not None and index % self._n == 0:
            self._cached_tokens += delta.finish.usage.cached_tokens

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
