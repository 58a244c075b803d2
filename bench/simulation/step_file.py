"""Recorded steps, as `GET /v1/steps?shares=1` returns them: from files or from a server."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import orjson

__all__ = ["RecordedShare", "RecordedStep", "StepFileError", "load_steps"]

PAGE = 1000  # steps asked for at once
TIMEOUT_S = 30.0


class StepFileError(Exception):
    """What was read holds no steps; the message says where and why."""


@dataclass(frozen=True, slots=True)
class RecordedShare:
    """As jaxengine's StepShare."""

    request_id: str
    first_position: int
    num_tokens: int
    samples: bool

    @property
    def end(self) -> int:
        return self.first_position + self.num_tokens


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """As jaxengine's StepRecord, as far as it is needed here."""

    index: int
    scheduled_s: float
    device_start_s: float
    end_s: float
    num_slots: int
    shares: tuple[RecordedShare, ...]
    overtaken_s: float = 0.0

    @property
    def duration_s(self) -> float:
        return self.end_s - self.device_start_s - self.overtaken_s

    @property
    def num_tokens(self) -> int:
        return sum(share.num_tokens for share in self.shares)

    @property
    def decode_only(self) -> bool:
        """Whether every request got one token."""
        return all(share.num_tokens == 1 for share in self.shares)

    @property
    def decode_context(self) -> int:
        """Sum over single tokens of the tokens that each attends to."""
        return sum(share.end for share in self.shares if share.num_tokens == 1)

    @property
    def prefill_context(self) -> int:
        """The same over prompt tokens; the token at position i attends to i + 1."""
        return sum(
            share.num_tokens * (share.first_position + share.end + 1) // 2
            for share in self.shares
            if share.num_tokens > 1
        )


def load_steps(sources: Sequence[str]) -> list[RecordedStep]:
    """Read steps from JSON files (a body of /v1/steps, or a list of steps) or from servers' URLs.

    Returns:
        All of them by index, each once.

    Raises:
        StepFileError: a source cannot be read, or holds no steps with shares.
    """
    steps: dict[int, RecordedStep] = {}
    for source in sources:
        try:
            is_url = source.startswith(("http://", "https://"))
            bodies = read_server(source) if is_url else orjson.loads(Path(source).read_bytes())
            steps |= {step.index: step for step in parse_steps(bodies)}
        except (OSError, URLError, ValueError, KeyError, TypeError) as error:
            raise StepFileError(f"{source}: {type(error).__name__}: {error}") from error
    if not any(step.shares for step in steps.values()):
        raise StepFileError(f"no steps with shares in {', '.join(sources)}")
    return [steps[index] for index in sorted(steps)]


def parse_steps(body: Any) -> Iterable[RecordedStep]:
    """Steps from a decoded body, or from a list of steps."""
    for step in body["steps"] if isinstance(body, dict) else body:
        yield RecordedStep(
            index=step["index"],
            scheduled_s=step["scheduled_s"],
            device_start_s=step["device_start_s"],
            end_s=step["end_s"],
            num_slots=step["num_slots"],
            shares=tuple(
                RecordedShare(
                    share["request_id"],
                    share["first_position"],
                    share["num_tokens"],
                    share["samples"],
                )
                for share in step["shares"]
            ),
            overtaken_s=step.get("overtaken_s", 0.0),  # older files have none
        )


def read_server(url: str) -> list[Any]:
    """All steps that a server still keeps."""
    steps: list[Any] = []
    after = -1
    while True:
        page_url = f"{url.rstrip('/')}/v1/steps?after={after}&limit={PAGE}&shares=1"
        with urlopen(page_url, timeout=TIMEOUT_S) as response:
            page = orjson.loads(response.read())
        steps += page["steps"]
        if not page["steps"]:
            return steps
        after = page["next_after"]
