"""Log-probabilities on the device against log-softmax in double precision."""

import jax
import numpy as np
import pytest

from compile_cache import use_compile_cache
from jaxengine.logprobs import NUM_FIELDS, prompt_logprobs, read_logprobs, token_logprobs
from jaxengine.sampling_params import MAX_LOGPROBS

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def compile_cache():
    use_compile_cache()


def log_softmax(logits):
    x = logits.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize("vocab", [8, 300, 5000])
def test_they_are_the_log_softmax_of_the_logits(vocab):
    logits = RNG.standard_normal((8, vocab), np.float32) * 5
    chosen = RNG.integers(0, vocab, 8).astype(np.int32)
    rows = np.asarray(jax.jit(token_logprobs)(logits, chosen))
    expected = log_softmax(logits)
    num_top = min(vocab, MAX_LOGPROBS)
    for row, token_id, values in zip(rows, chosen, expected, strict=True):
        found = read_logprobs(row, num_top)
        assert found.logprob == pytest.approx(values[token_id], abs=2e-5)
        order = np.argsort(-values)[:num_top].tolist()
        assert [token_id for token_id, _ in found.top] == order
        assert [value for _, value in found.top] == pytest.approx(values[order], abs=2e-5)


def test_the_likeliest_token_is_exactly_as_likely_as_its_alternative():
    """Evaluations compare the two to find out whether a token is the greedy one."""
    logits = RNG.standard_normal((8, 300), np.float32)
    rows = np.asarray(jax.jit(token_logprobs)(logits, logits.argmax(-1).astype(np.int32)))
    for row in rows:
        found = read_logprobs(row, 1)
        assert found.logprob == found.top[0][1]


def test_no_alternatives_may_be_wanted():
    row = np.zeros(NUM_FIELDS, np.int32)
    assert read_logprobs(row, 0) == (0.0, ())


def test_only_tokens_with_a_target_get_a_row():
    """Seven tokens in chunks of three; the identity stands for the layers."""
    logits = RNG.standard_normal((7, 40), np.float32)
    targets = np.array([5, -1, -1, -1, -1, -1, 39], np.int32)
    rows = np.asarray(
        jax.jit(lambda x, t: prompt_logprobs(x, t, lambda h: h, chunk=3))(logits, targets)
    )
    expected = log_softmax(logits)
    assert rows.shape == (7, NUM_FIELDS)
    for index in (0, 6):
        found = read_logprobs(rows[index], 2)
        assert found.logprob == pytest.approx(expected[index, targets[index]], abs=2e-5)
        assert found.top[0][0] == logits[index].argmax()
    assert not rows[3].any()  # its chunk has no target at all
