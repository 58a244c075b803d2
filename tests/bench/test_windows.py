from array import array

import pytest

from bench.stream import RequestRecord
from bench.windows import gaps_between, output_tokens_between, prompts_between


def stream(**fields: object) -> RequestRecord:
    """Tokens at 11 (one), 12 (one) and 14 (two)."""
    record = RequestRecord(
        index=0,
        start_s=10.0,
        first_token_s=1.0,
        last_token_s=4.0,
        gaps_s=array("d", [1.0, 2.0]),
        gap_tokens=array("L", [1, 2]),
        first_tokens=1,
    )
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def silent() -> RequestRecord:
    return RequestRecord(index=1, start_s=10.0)


@pytest.mark.parametrize(
    ("start_s", "end_s", "expected"),
    [(0, 100, 4), (11, 12, 1), (11, 14, 2), (11.5, 14.5, 3), (15, 20, 0)],
)
def test_tokens_are_counted_when_they_come(start_s: float, end_s: float, expected: int):
    assert output_tokens_between([stream(), silent()], start_s, end_s) == expected


def test_a_prompt_counts_when_its_first_token_comes():
    record = stream()
    assert prompts_between([record, silent()], 11, 12) == [record]
    assert prompts_between([record], 12, 20) == []


def test_gaps_within_a_window_begin_and_end_in_it():
    assert gaps_between([stream(), silent()], 11, 14) == [1.0, 1.0, 1.0]
    assert gaps_between([stream()], 11.5, 14) == [1.0, 1.0]  # the gap of two tokens
    assert gaps_between([stream()], 11.5, 13.5) == []


def test_gaps_that_touch_a_window_may_begin_before_and_end_after_it():
    assert gaps_between([stream()], 12.5, 13, touching=True) == [1.0, 1.0]
    assert gaps_between([stream()], 11.5, 12.5, touching=True) == [1.0, 1.0, 1.0]
    assert gaps_between([stream()], 14, 20, touching=True) == []
