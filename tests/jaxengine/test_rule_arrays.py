import numpy as np

from jaxengine.rule_arrays import RuleArrays, RuleLayout
from jaxengine.sampling_params import MAX_LOGIT_BIAS, SamplingParams
from jaxengine.token_rules import GENERATED, TokenRules

LAYOUT = RuleLayout(num_seqs=3, vocab_size=40, max_model_len=6)
RESIDENT = LAYOUT.resident()


def rules(prompt=(), **fields):
    params = SamplingParams(max_tokens=4, **fields)
    return TokenRules(params, prompt, eos_token_ids=(), end_token_ids=())


def test_the_resident_arrays_are_zeros_of_the_named_shapes():
    assert list(LAYOUT.shapes()) == list(RuleArrays._fields)
    assert [array.shape for array in RESIDENT] == [(3, 2), (3, 2, MAX_LOGIT_BIAS), (3, 6)]
    assert not any(np.asarray(array).any() for array in RESIDENT)


def test_arrays_that_nobody_needs_stay_on_the_device():
    packed = LAYOUT.pack([(1, rules(logit_bias=((5, 1.0),)), 0)], RESIDENT)
    assert packed.masks is RESIDENT.masks
    assert packed.histories is RESIDENT.histories
    ids, values = packed.biases[1]
    assert ids[:2].tolist() == [5, -1]
    assert values[:1].view(np.float32).tolist() == [1.0]
    assert (packed.biases[0, 0] == -1).all()


def test_sequences_without_a_mask_may_get_every_token():
    packed = LAYOUT.pack([(2, rules(allowed_token_ids=(0, 33)), 0)], RESIDENT)
    assert packed.masks.tolist() == [[-1, -1], [-1, -1], [1, 2]]


def test_a_history_marks_what_was_generated():
    rule = rules((3, 4), presence_penalty=1.0)
    rule.append(9)
    packed = LAYOUT.pack([(0, rule, 1)], RESIDENT)
    assert packed.histories[0].tolist() == [3, 4, 9 | GENERATED, -1, -1, -1]
    assert (packed.histories[1:] == -1).all()
