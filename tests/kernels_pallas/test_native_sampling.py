"""Where the native library draws; tests/jaxengine/test_sampling.py has what it may draw."""

import numpy as np
import pytest

from attention_kernels import ready_kernel
from kernels_pallas.native_sampling import sample


@pytest.fixture(autouse=True)
def ready():
    if ready_kernel() != "native":
        pytest.skip("no compiler here")


def draw(logits, uniform, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    logits = np.log(np.array([logits] * len(uniform), np.float32))
    rows = np.ones(len(uniform), np.float32)
    return sample(
        logits,
        temperature_S=rows * temperature,
        top_k_S=np.full(len(uniform), top_k, np.int32),
        top_p_S=rows * top_p,
        min_p_S=rows * min_p,
        uniform_S=np.array(uniform, np.float32),
        wanted_S=rows > 0,
    ).tolist()


def test_tokens_are_drawn_where_their_cumulative_distribution_is():
    # 0.1, 0.4, 0.3 and 0.2, in the order of their ids.
    uniform = [0.0, 0.09, 0.11, 0.49, 0.51, 0.79, 0.81, 0.9999999]
    assert draw([1, 4, 3, 2], uniform) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_what_is_not_kept_takes_no_share():
    # Left are 4 and 3 of 7: 0.571.
    for filters in ({"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.6}):
        assert draw([1, 4, 3, 2], [0.0, 0.57, 0.58, 0.99], **filters) == [1, 1, 2, 2]


def test_the_temperature_is_an_exponent():
    # 4 ** 2 and 2 ** 2 of 20: 0.8.
    assert draw([4, 2], [0.79, 0.81], temperature=0.5) == [0, 1]
    assert draw([4, 2], [0.79, 0.81], temperature=0.0) == [0, 0]


def test_filters_keep_what_they_should_at_low_temperatures():
    """At 0.01 the second token is 69 nats below the first, and nothing else is ever drawn."""
    for filters in ({"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}, {}):
        assert draw([1, 2, 4, 1], [0.0001, 0.5, 0.9999], temperature=0.01, **filters) == [2] * 3
