"""Whether a server still gives the golden answers: greedy ones of another implementation."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from bench.scenario import Sender
from bench.stream import RequestFailed

__all__ = ["GoldenCase", "GoldenResult", "check_golden", "load_golden"]

# Where two tokens' log-probabilities are this close, bfloat16 may choose either.
CLOSE = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenCase:
    """A prompt and what greedy sampling answers.

    Attributes:
        margins: of each token of the answer, how much likelier than the next best it was, in
            log-probability.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    margins: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenResult:
    """How far the answers went with the golden ones.

    Attributes:
        num_equal: answers without any difference.
        num_held: answers that left the golden one nowhere, or first where two tokens were close.
        tokens_held, num_tokens: tokens up to the first difference, and of all golden answers.
    """

    num_cases: int
    num_equal: int
    num_held: int
    tokens_held: int
    num_tokens: int

    @property
    def holds(self) -> bool:
        """Whether rounding explains every difference."""
        return self.num_held == self.num_cases

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "holds": self.holds}


def load_golden(path: Path) -> list[GoldenCase]:
    """Read the cases of a file."""
    rows = json.loads(path.read_text(encoding="utf-8"))["cases"]
    names = GoldenCase.__dataclass_fields__
    return [GoldenCase(**{name: row[name] for name in names}) for row in rows]


async def check_golden(sender: Sender, cases: Sequence[GoldenCase]) -> GoldenResult:
    """Ask a server for all answers at once, and compare.

    Raises:
        RequestFailed: it does not answer, or tells no token ids.
    """
    answers = await asyncio.gather(*(ask(sender, case) for case in cases))
    return compare(cases, answers)


async def ask(sender: Sender, case: GoldenCase) -> list[int]:
    """The token ids of one answer."""
    body = {
        "model": sender.target.model,
        "prompt": case.prompt_ids,
        "max_tokens": len(case.output_ids),
        "temperature": 0,
        "return_token_ids": True,
    }
    try:
        async with sender.session.post(sender.target.request_url, json=body) as response:
            answer = orjson.loads(await response.read())
    except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
        raise RequestFailed("golden", str(error)) from error
    return token_ids_of(answer)


def token_ids_of(answer: Mapping[str, Any]) -> list[int]:
    """The ids of the first choice."""
    choices = answer.get("choices") or [{}]
    ids = choices[0].get("token_ids")
    if ids is None:
        raise RequestFailed("golden", f"no token ids in {str(answer)[:200]}")
    return list(ids)


def compare(cases: Sequence[GoldenCase], answers: Sequence[Sequence[int]]) -> GoldenResult:
    """Compare answers with the golden ones."""
    num_equal = num_held = tokens_held = 0
    for case, answer in zip(cases, answers, strict=True):
        length = agreed_length(case.output_ids, answer)
        is_equal = length == len(case.output_ids)
        num_equal += is_equal
        num_held += is_equal or case.margins[length] < CLOSE
        tokens_held += length
    return GoldenResult(
        num_cases=len(cases),
        num_equal=num_equal,
        num_held=num_held,
        tokens_held=tokens_held,
        num_tokens=sum(len(case.output_ids) for case in cases),
    )


def agreed_length(golden: Sequence[int], answer: Sequence[int]) -> int:
    """How many tokens there are before the first difference."""
    for position, token in enumerate(golden):
        if position >= len(answer) or answer[position] != token:
            return position
    return len(golden)
