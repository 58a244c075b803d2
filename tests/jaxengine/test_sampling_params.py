import math

import pytest

from jaxengine.errors import InvalidRequestError
from jaxengine.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams


def test_only_max_tokens_must_be_given():
    params = SamplingParams(max_tokens=5)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.min_tokens, params.seed, params.stop_token_ids) == (0, None, ())
    assert not params.ignore_eos


@pytest.mark.parametrize(
    ("temperature", "is_greedy"),
    [(0, True), (0.0, True), (9e-6, True), (1e-5, False), (0.7, False), (100, False)],
)
def test_a_temperature_next_to_nothing_is_greedy(temperature, is_greedy):
    assert SamplingParams(max_tokens=1, temperature=temperature).is_greedy is is_greedy


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 1},
        {"max_tokens": 2**40},
        {"max_tokens": 5, "min_tokens": 5},
        {"max_tokens": 5, "temperature": 100},
        {"max_tokens": 5, "top_k": 2**31 - 1},
        {"max_tokens": 5, "top_p": 1},
        {"max_tokens": 5, "top_p": 1e-9},
        {"max_tokens": 5, "min_p": 0},
        {"max_tokens": 5, "min_p": 1},
        {"max_tokens": 5, "seed": 0},
        {"max_tokens": 5, "seed": -(2**63)},
        {"max_tokens": 5, "seed": 2**64 - 1},
        {"max_tokens": 5, "stop_token_ids": tuple(range(MAX_STOP_TOKEN_IDS))},
    ],
)
def test_values_at_the_edge_are_accepted(values):
    SamplingParams(**values)


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("max_tokens", 0, "max_tokens must be at least 1, got 0"),
        ("max_tokens", -1, "max_tokens must be at least 1, got -1"),
        ("min_tokens", -1, "min_tokens must be between 0 and max_tokens (5), got -1"),
        ("min_tokens", 6, "min_tokens must be between 0 and max_tokens (5), got 6"),
        ("temperature", -0.1, "temperature must be in [0, 100], got -0.1"),
        ("temperature", 999999, "temperature must be in [0, 100], got 999999"),
        ("temperature", math.nan, "temperature must be in [0, 100], got nan"),
        ("temperature", math.inf, "temperature must be in [0, 100], got inf"),
        ("top_k", -1, "top_k must be between 0 (off) and 2147483647, got -1"),
        ("top_k", 2**31, "top_k must be between 0 (off) and 2147483647, got 2147483648"),
        ("top_p", 0, "top_p must be in (0, 1], got 0"),
        ("top_p", -1.0, "top_p must be in (0, 1], got -1.0"),
        ("top_p", 1.1, "top_p must be in (0, 1], got 1.1"),
        ("top_p", math.nan, "top_p must be in (0, 1], got nan"),
        ("min_p", -0.5, "min_p must be in [0, 1], got -0.5"),
        ("min_p", 1.5, "min_p must be in [0, 1], got 1.5"),
        ("min_p", math.nan, "min_p must be in [0, 1], got nan"),
        ("seed", 2**64, f"seed must be a 64-bit integer, got {2**64}"),
        ("seed", -(2**63) - 1, f"seed must be a 64-bit integer, got {-(2**63) - 1}"),
        ("stop_token_ids", tuple(range(17)), "stop_token_ids may hold at most 16 ids, got 17"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field, value, complaint):
    values = {"max_tokens": 5} | {field: value}
    with pytest.raises(InvalidRequestError) as refusal:
        SamplingParams(**values)
    assert str(refusal.value) == complaint
    assert refusal.value.field == field


@pytest.mark.parametrize("field", ["min_tokens", "temperature", "top_k", "top_p", "min_p", "seed"])
def test_a_number_larger_than_any_float_is_refused_like_any_other(field):
    with pytest.raises(InvalidRequestError, match=f"^{field} must be"):
        SamplingParams(**({"max_tokens": 5} | {field: 10**400}))
