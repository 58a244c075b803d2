"""Thoughts that a model writes before its answer, between ``<think>`` and ``</think>``.

Some templates put the opening mark into the prompt, and then the answer begins inside.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from gateway.config import ReasoningFormat
from gateway.errors import InvalidRequest
from gateway.openai.tool_parsers import CharSource, EndOfText, PartSink, Reader, read_text

__all__ = [
    "REASONING_END",
    "REASONING_START",
    "ReasoningCounter",
    "read_reasoning",
    "reasoning_format",
    "thinks",
]

REASONING_START = "<think>"
REASONING_END = "</think>"
SWITCHES = ("enable_thinking", "thinking")


def reasoning_format(chosen: ReasoningFormat, template: str) -> Literal["think", "none"]:
    """Return how a model marks its thoughts; "auto" looks for the marks in its chat template."""
    if chosen == "auto":
        return "think" if REASONING_END in template else "none"
    return chosen


def thinks(effort: str | None, options: Mapping[str, object]) -> bool | None:
    """Return whether a client wants thoughts; None if it does not say.

    Args:
        effort: OpenAI's field; only "none" is heeded.
        options: what it wants to tell the chat template.

    Raises:
        InvalidRequest: the options hold anything else but switches of thinking.
    """
    wanted = False if effort == "none" else None
    for name, value in options.items():
        if name not in SWITCHES:
            raise InvalidRequest(
                f"chat_template_kwargs may hold {' and '.join(SWITCHES)} only",
                param="chat_template_kwargs",
                code="unsupported_parameter",
            )
        if not isinstance(value, bool | None):
            raise InvalidRequest(
                f"chat_template_kwargs.{name} must be true or false",
                param=f"chat_template_kwargs.{name}",
            )
        wanted = wanted if value is None else value
    return wanted


def read_reasoning(source: CharSource, sink: PartSink, *, is_inside: bool) -> Reader[None]:
    """Read thoughts, if the answer begins with some; then the source stands at the answer.

    White space around the thoughts is no part of them, nor of the answer.

    Args:
        source: the whole answer.
        sink: gets the thoughts.
        is_inside: the prompt has opened them already.

    Raises:
        EndOfText: the text ended first; all of it has been given away.
    """
    if not is_inside and not (yield from _opens(source, sink)):
        return
    try:
        yield from source.skip_space()
        yield from read_text(source, sink.reasoning, [REASONING_END])
        yield from source.skip_space()
    except EndOfText:
        raise EndOfText from None  # white space at the end is no part of anything


class ReasoningCounter:
    """Counts the tokens of thoughts, marks included, where each mark is one token.

    Args:
        start_id, end_id: the tokens of the marks.
        is_inside: the prompt has opened the thoughts already.
        token_bytes: what a token adds to the text.
    """

    def __init__(
        self,
        start_id: int,
        end_id: int,
        *,
        is_inside: bool,
        token_bytes: Callable[[int], bytes],
    ) -> None:
        self._start_id = start_id
        self._end_id = end_id
        self._token_bytes = token_bytes
        self._state: Literal["before", "inside", "after"] = "inside" if is_inside else "before"

    def count(self, token_ids: Sequence[int]) -> int:
        """Return how many of the next tokens of the answer are thoughts."""
        num_tokens = 0
        for token_id in token_ids:
            if self._state == "before":
                if token_id == self._start_id:
                    self._state = "inside"
                elif self._token_bytes(token_id).strip():
                    self._state = "after"
            if self._state == "inside":
                num_tokens += 1
                if token_id == self._end_id:
                    self._state = "after"
        return num_tokens


def _opens(source: CharSource, sink: PartSink) -> Reader[bool]:
    """Take the opening mark; if something else comes first, take nothing."""
    source.start_record()
    try:
        yield from source.skip_space()
        for char in REASONING_START:
            if (yield from source.peek()) != char:
                source.unread(source.record)
                return False
            yield from source.take()
    except EndOfText:
        if source.record:
            sink.reply(source.record)
        raise
    return True
