"""Biases, penalties and masks against what numpy says."""

import jax
import numpy as np
import pytest

from compile_cache import use_compile_cache
from jaxengine import logit_rules
from jaxengine.batch_layout import RulesBatch
from jaxengine.logit_rules import apply_rules
from jaxengine.rule_arrays import RuleArrays, RuleLayout
from jaxengine.sampling import REMOVED
from jaxengine.sampling_params import SamplingParams
from jaxengine.token_rules import TokenRules

VOCAB, LENGTH = 70, 12
LOGITS = np.random.default_rng(1).standard_normal((8, VOCAB), np.float32) * 3
apply_jit = jax.jit(apply_rules)


@pytest.fixture(autouse=True)
def compile_cache():
    use_compile_cache()


def ruled(*sequences, pending=(), logits=LOGITS, apply=apply_jit):
    """Apply rules; each sequence is (parameters, prompt, generated ids)."""
    layout = RuleLayout(8, VOCAB, LENGTH)
    rules, arrays = [], {name: np.zeros(8, np.float32) for name in RulesBatch._fields[:3]}
    for seq, (fields, prompt, generated) in enumerate(sequences):
        params = SamplingParams(max_tokens=9, **fields)
        rule = TokenRules(params, prompt, eos_token_ids=(), end_token_ids=())
        for token_id in generated:
            rule.append(token_id)
        rules.append((seq, rule, len(generated)))
        if params.penalizes:
            for name, array in arrays.items():
                array[seq] = getattr(params, name)
    all_params = [rule.params for _, rule, _ in rules]
    batch = RulesBatch(
        **arrays,
        any_biased=np.bool_(any(p.logit_bias for p in all_params)),
        any_penalized=np.bool_(any(p.penalizes for p in all_params)),
        any_masked=np.bool_(any(p.masks for p in all_params)),
    )
    pending_S = np.full(8, -1, np.int32)
    pending_S[: len(pending)] = pending
    none = RuleArrays(*(np.zeros(shape, np.int32) for shape in layout.shapes().values()))
    return np.asarray(apply(logits, batch, layout.pack(rules, none), pending_S))


def test_biases_are_added():
    found = ruled(({"logit_bias": ((0, 1.5), (69, -100))}, (), ()))
    expected = LOGITS.copy()
    expected[0, 0] += np.float32(1.5)
    expected[0, 69] -= 100
    np.testing.assert_array_equal(found, expected)


def test_presence_and_frequency_count_what_was_generated():
    fields = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    found = ruled((fields, (1, 2, 3), (7, 9, 7)))
    expected = LOGITS.copy()
    expected[0, 7] -= 0.25 * 2 + 0.5
    expected[0, 9] -= 0.25 + 0.5
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_repetition_counts_the_prompt_too():
    """As in Hugging Face: positive logits are divided, others multiplied."""
    found = ruled(({"repetition_penalty": 1.3}, (1, 2, 2), (7,)))
    expected = LOGITS.copy()
    for token_id in (1, 2, 7):
        x = expected[0, token_id]
        expected[0, token_id] = x / np.float32(1.3) if x > 0 else x * np.float32(1.3)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_array_equal(found[1:], LOGITS[1:])


def test_a_pending_token_counts_as_one_that_is_known():
    fields = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 0.7}
    known = ruled((fields, (1,), (7, 9, 7)))
    pending = ruled((fields, (1,), (7, 9)), pending=(7,))
    np.testing.assert_array_equal(known, pending)


@pytest.mark.parametrize("columns", [1, 5, 12, 100])
def test_a_history_may_be_counted_in_pieces(columns, monkeypatch):
    """12 columns; the last piece of 5 begins again at the seventh."""
    monkeypatch.setattr(logit_rules, "COLUMNS_AT_ONCE", columns)
    fields = {"frequency_penalty": 0.25, "repetition_penalty": 2.0}
    histories = [((1, 2), (7, 9, 7)), ((1,) * 3, (7,) * 8), ((5,), (7, 8) * 5), ((1,), ())]
    found = ruled(
        *((fields, *history) for history in histories),
        pending=(3, -1, 7),
        apply=jax.jit(lambda *arrays: apply_rules(*arrays)),  # traced anew
    )
    expected = LOGITS.copy()
    for seq, (prompt, generated) in enumerate(histories):
        generated = (*generated, *((3,), (), (7,), ())[seq])
        for token_id in {*prompt, *generated}:
            x = expected[seq, token_id]
            x = x / np.float32(2) if x > 0 else x * np.float32(2)
            expected[seq, token_id] = x - np.float32(0.25) * generated.count(token_id)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_only_what_is_allowed_stays():
    found = ruled(({"allowed_token_ids": (0, 31, 32, 69)}, (), ()))
    kept = np.zeros(VOCAB, bool)
    kept[[0, 31, 32, 69]] = True
    np.testing.assert_array_equal(found[0], np.where(kept, LOGITS[0], REMOVED))
    np.testing.assert_array_equal(found[1:], LOGITS[1:])


def test_a_sequence_does_not_depend_on_the_others():
    sequences = [
        ({"presence_penalty": 1.0, "logit_bias": ((3, 2.0),)}, (1, 2), (3, 3)),
        ({"repetition_penalty": 2.0, "bad_words": ((5,), (3, 4))}, (5, 6), (3,)),
        ({"frequency_penalty": -1.0, "allowed_token_ids": (1, 2)}, (1,), (1, 1, 2)),
        ({"logit_bias": ((1, 1.0),)}, (), ()),
    ]
    together = ruled(*sequences)
    for seq, sequence in enumerate(sequences):
        alone = ruled(sequence, logits=np.roll(LOGITS, -seq, axis=0))
        np.testing.assert_array_equal(alone[0], together[seq])
