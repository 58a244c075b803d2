import pytest

from engine_loop import small_config
from jaxengine.batching import STATIC_PATIENCE_S, ClosedBatch
from jaxengine.request import Request
from jaxengine.sampling_params import SamplingParams


def closed_batch(batching: str) -> ClosedBatch:
    return ClosedBatch(small_config(batching=batching, batch_window_s=3.0))


def members(*lengths: int, cached: int = 0) -> list[Request]:
    requests = []
    for length in lengths:
        params = SamplingParams(max_tokens=9)
        request = Request("a", (1,) * length, params, seed=0, arrival_time_s=0.0)
        request.num_computed_tokens = cached
        requests.append(request)
    return requests


def arrived(*times_s):
    params = SamplingParams(max_tokens=9)
    return [Request("a", (1,), params, seed=0, arrival_time_s=time_s) for time_s in times_s]


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_a_batch_is_full_when_all_rows_are_taken(batching):
    batch = closed_batch(batching)
    batch.note_arrival(10.0)
    is_open = [batch.opens_at_s(arrived(*[10.0] * number)) <= 10.0 for number in (1, 3, 4, 5)]
    assert is_open == [False, False, True, True]


def test_a_dynamic_batch_waits_for_its_window_from_the_first_arrival():
    batch = closed_batch("dynamic")
    batch.note_arrival(12.0)
    assert batch.opens_at_s(arrived(12.0, 10.0)) == 13.0


def test_a_static_batch_waits_until_nobody_new_has_come_for_long():
    batch = closed_batch("static")
    batch.note_arrival(10.0)
    assert batch.opens_at_s(arrived(10.0)) == 10.0 + STATIC_PATIENCE_S
    batch.note_arrival(12.0)
    assert batch.opens_at_s(arrived(10.0, 12.0)) == 12.0 + STATIC_PATIENCE_S


def test_prompts_are_padded_to_the_longest():
    batch = closed_batch("static")
    assert not batch.has_padding
    batch.begin(members(10, 4, 7))  # 0 + 6 + 3
    assert batch.has_padding
    assert [batch.take_padding(most) for most in (0, 5, 16, 16)] == [0, 5, 4, 0]
    assert not batch.has_padding


def test_what_is_cached_needs_no_padding():
    batch = closed_batch("static")
    batch.begin([*members(20, cached=16), *members(10)])  # 4 and 10 tokens are to be computed
    assert batch.take_padding(100) == 6


def test_a_batch_of_one_has_no_padding():
    batch = closed_batch("static")
    batch.begin(members(10))
    assert not batch.has_padding


def test_padding_that_the_last_batch_left_is_not_computed_in_the_next():
    batch = closed_batch("static")
    batch.begin(members(10, 4))
    batch.begin(members(5, 5))
    assert not batch.has_padding


def test_rows_that_are_not_live_have_ended():
    batch = closed_batch("static")
    batch.begin(members(1, 2, 3))
    assert [batch.ended_rows(num_live) for num_live in (3, 2, 1)] == [0, 1, 2]
