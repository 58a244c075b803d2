"""What happens to a stream, as one sequence of typed events."""

from dataclasses import dataclass

from headrace_client.inbox import TextDelta
from headrace_client.messages import Timing, Usage

__all__ = ["Finished", "Resumed", "Started", "StreamEvent"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """The server has accepted the request; the first event.

    Attributes:
        request_id: the server's name for it, as in its logs.
        prompt_tokens: length of the prompt.
    """

    request_id: str
    prompt_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """The connection was lost, and the stream goes on without a gap.

    Attributes:
        num_resumes: how often so far.
    """

    num_resumes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The end; the last event. The fields are those of the Stream."""

    finish_reason: str
    stop_reason: str | int | None
    usage: Usage
    timing: Timing


StreamEvent = Started | TextDelta | Resumed | Finished
