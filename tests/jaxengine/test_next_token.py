"""What is told of a token is the model's own, whatever was done to the logits before sampling."""

import jax
import numpy as np
import pytest

from compile_cache import use_compile_cache
from jaxengine.batch_layout import BatchLayout
from jaxengine.buckets import Bucket
from jaxengine.logprobs import read_logprobs
from jaxengine.next_token import next_tokens
from jaxengine.rule_arrays import RuleLayout
from jaxengine.sampling_params import SamplingParams
from jaxengine.token_rules import TokenRules

VOCAB = 50
LAYOUT = BatchLayout(Bucket(8, 8, True), 2, 1)
RULES = RuleLayout(8, VOCAB, 10)
LOGITS = np.random.default_rng(3).standard_normal((8, VOCAB), np.float32)


@pytest.fixture(autouse=True)
def compile_cache():
    use_compile_cache()


@jax.jit
def run(logits, packed, arrays, pending):
    batch = LAYOUT.choice.unpack(packed[-LAYOUT.choice.size :])
    return next_tokens(
        logits,
        batch,
        arrays,
        pending,
        compute_logits=lambda: logits + 0,
        wanted_S=np.ones(len(logits), bool),
        native=False,
    )


def tokens(*, rules=(), suppressed=(), logprobs=True):
    """Sample greedily; `rules` are fields of SamplingParams for the first sequences."""
    packed = np.zeros(LAYOUT.size, np.int32)
    views = LAYOUT.views(packed)
    views["suppressed_ids"][:] = -1
    views["suppressed_ids"][0, : len(suppressed)] = suppressed
    views["any_suppressed"][...] = bool(suppressed)
    views["any_logprobs"][...] = logprobs
    found = []
    for seq, fields in enumerate(rules):
        params = SamplingParams(max_tokens=4, **fields)
        found.append((seq, TokenRules(params, (), eos_token_ids=(), end_token_ids=()), 0))
        views["any_biased"][...] |= bool(params.logit_bias)
        views["any_masked"][...] |= params.masks
    arrays = RULES.pack(found, RULES.resident())
    sampled, rows = run(LOGITS, packed, arrays, np.full(8, -1, np.int32))
    return np.asarray(sampled).tolist(), np.asarray(rows)


def log_softmax(x):
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


GREEDY = LOGITS.argmax(-1).tolist()
SECOND = np.argsort(-LOGITS[0])[1]


@pytest.mark.parametrize(
    ("wishes", "expected"),
    [
        ({}, GREEDY),
        ({"suppressed": (GREEDY[0],)}, [SECOND, *GREEDY[1:]]),
        ({"rules": [{"logit_bias": ((7, 100.0),)}]}, [7, *GREEDY[1:]]),
        ({"rules": [{"allowed_token_ids": (9,)}]}, [9, *GREEDY[1:]]),
        ({"rules": [{"bad_words": ((GREEDY[0],),)}]}, [SECOND, *GREEDY[1:]]),
    ],
    ids=str,
)
def test_a_token_is_told_as_the_model_saw_it(wishes, expected):
    sampled, rows = tokens(**wishes)
    assert sampled == expected
    model = log_softmax(LOGITS)
    for seq, token_id in enumerate(sampled):
        found = read_logprobs(rows[seq], 3)
        assert found.logprob == pytest.approx(model[seq, token_id], abs=1e-5)
        assert [i for i, _ in found.top] == np.argsort(-LOGITS[seq])[:3].tolist()


def test_nothing_is_told_that_nobody_wants():
    sampled, rows = tokens(logprobs=False)
    assert sampled == GREEDY
    assert not rows.any()
