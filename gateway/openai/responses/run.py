"""One response on its way through the engine."""

import dataclasses
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from gateway.delta_reader import deltas_and_silences
from gateway.errors import GatewayError, InternalError
from gateway.generation import PreparedGeneration, TextFinish, TextGenerator, TextStream
from gateway.openai.responses.builder import ResponseBuilder
from gateway.openai.responses.items import output_messages
from gateway.openai.responses.protocol import Event, ResponseObject
from gateway.openai.tool_parsers import CallStart, Part
from gateway.openai.tools import AnswerReading, new_call_id
from gateway.text_codec import ChatMessage

__all__ = ["ResponseRun"]

logger = logging.getLogger(__name__)


class ResponseRun:
    """Generates one answer and tells of it as events.

    Args:
        response: as it is at its beginning.
        conversation: what it answers, without instructions.
        num_inputs: how many messages of that are new.
        answers: false only computes the prompt, so that it is in the prefix cache.

    Attributes:
        failure: why it failed, if it did.
    """

    def __init__(
        self,
        generator: TextGenerator,
        prepared: PreparedGeneration,
        reading: AnswerReading,
        response: ResponseObject,
        *,
        conversation: tuple[ChatMessage, ...],
        num_inputs: int,
        answers: bool = True,
    ) -> None:
        self._generator = generator
        self._prepared = prepared
        self._style = reading.style
        self._parser = reading.parser(generator, prepared)
        self._counter = reading.counter(generator, prepared)
        self._builder = ResponseBuilder(response)
        self._conversation = conversation
        self._num_inputs = num_inputs
        self._answers = answers
        self._num_reasoning_tokens = 0
        self._stream: TextStream | None = None
        self.failure: GatewayError | None = None

    @property
    def response(self) -> ResponseObject:
        """The response as it is now."""
        return self._builder.response

    @property
    def has_ended(self) -> bool:
        return self.response.status != "in_progress"

    @property
    def inputs(self) -> tuple[ChatMessage, ...]:
        """What is new of what it answers."""
        return self._conversation[len(self._conversation) - self._num_inputs :]

    @property
    def conversation(self) -> tuple[ChatMessage, ...]:
        """What it answers, and the answer."""
        return (*self._conversation, *output_messages(self.response.output))

    def cancel(self) -> None:
        """End it with what there is. Idempotent; before `events` has begun it does nothing."""
        if self._stream is not None:
            self._stream.cancel()

    async def events(self, *, idle_s: float | None = None) -> AsyncGenerator[list[Event] | None]:
        """Yield all events in order, those that come together at once; then the response has ended.

        The first ones come as soon as the engine has the request. None is yielded whenever nothing
        came for `idle_s`. Closing the generator early aborts the request.

        Raises:
            gateway.errors.GatewayError: the engine refused; nothing has been yielded.
        """
        async with self._generator.start(self._prepared) as stream:
            self._stream = stream
            yield self._builder.start()
            try:
                async with aclosing(deltas_and_silences(stream, idle_s)) as deltas:
                    async for delta in deltas:
                        if delta is None:
                            yield None
                            continue
                        if self._counter is not None:
                            self._num_reasoning_tokens += self._counter.count(delta.token_ids)
                        parts = self._parser.push(delta.text) if self._answers else []
                        if delta.finish is not None:
                            yield self._last(parts, delta.finish)
                        elif events := self._add(parts):
                            yield events
            except Exception:
                logger.exception("a response failed")
                yield self.fail(InternalError())

    def fail(self, error: GatewayError) -> list[Event]:
        """End it as failed, from outside, unless it has ended; return what there is to tell."""
        if self.has_ended:
            return []
        self.failure = error
        return self._builder.fail(error)

    def _add(self, parts: list[Part]) -> list[Event]:
        ids = [new_call_id(self._style) for part in parts if isinstance(part, CallStart)]
        return self._builder.add(parts, call_ids=ids)

    def _last(self, parts: list[Part], finish: TextFinish) -> list[Event]:
        if (failure := self._generator.failure(finish)) is not None:
            return [*self._add(parts), *self.fail(failure)]
        if not self._answers and finish.reason == "length":
            finish = dataclasses.replace(finish, reason="stop")
        events = self._add([*parts, *self._parser.finish()])
        return [
            *events,
            *self._builder.finish(
                finish,
                reasoning_tokens=self._num_reasoning_tokens,
                may_be_empty=not self._answers,
            ),
        ]
