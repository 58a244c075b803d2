import pytest

from jaxengine.sampling_params import SamplingParams
from jaxengine.token_rules import GENERATED, TokenRules

EOS = (14, 15)


class Words:
    """A grammar and its matcher: the ids 1, 2, 3 in this order, then the first EOS."""

    def __init__(self):
        self.accepted = []

    def new_matcher(self):
        return Words()

    def mask(self):
        following = {0: 1, 1: 2, 2: 3, 3: EOS[0]}[len(self.accepted)]
        return (1 << following).to_bytes(2, "little")

    def accept(self, token_id):
        self.accepted.append(token_id)

    @property
    def is_complete(self):
        return len(self.accepted) == 3


def rules(*, ends=EOS, **fields):
    params = SamplingParams(max_tokens=9, **fields)
    return TokenRules(params, (5, 6), eos_token_ids=EOS, end_token_ids=ends)


def allowed(rule, num_before=0):
    mask = rule.mask(2, num_before=num_before)
    assert len(mask) == 2
    return [i for i in range(16) if mask[i // 8] >> i % 8 & 1]


def test_a_history_is_kept_for_penalties_only():
    rule = rules(presence_penalty=0.1)
    rule.append(7)
    assert rule.history.tolist() == [5, 6, 7 | GENERATED]
    rule = rules(bad_words=((3,),))
    rule.append(7)
    assert rule.history.tolist() == []


def test_allowed_ids_are_the_only_ones():
    rule = rules(allowed_token_ids=(0, 8, 15))
    assert allowed(rule) == [0, 8, 15]
    assert rule.allows(8)
    assert not rule.allows(9)


def test_a_bad_word_is_forbidden_where_it_would_be_complete():
    rule = rules(bad_words=((3,), (1, 2), (1, 1, 4)))
    assert allowed(rule) == [i for i in range(16) if i != 3]
    rule.append(1)
    assert allowed(rule) == [i for i in range(16) if i not in (2, 3)]
    rule.append(1)
    assert allowed(rule) == [i for i in range(16) if i not in (2, 3, 4)]


def test_bad_words_of_one_token_go_with_the_other_rules():
    rule = rules(bad_words=((3,), (8,), (200,)), allowed_token_ids=(2, 3, 8, 15))
    assert allowed(rule) == [2, 15]
    rule.append(2)
    assert allowed(rule, num_before=1) == [2, 15]


def test_the_prompt_is_no_part_of_a_bad_word():
    rule = rules(bad_words=((6, 2),))
    assert 2 in allowed(rule)


def test_what_ends_the_answer_is_masked_until_min_tokens():
    rule = rules(allowed_token_ids=(1, 14), min_tokens=1, ends=(14, 15, 1))
    assert allowed(rule) == []
    assert not rule.allows(14)
    rule.append(3)
    assert allowed(rule, num_before=1) == [1, 14]


def test_a_token_that_is_on_its_way_counts_for_min_tokens():
    """The mask of the third token is made before the second is known, which may not be an end."""
    rule = rules(allowed_token_ids=(1, 2, 14), min_tokens=2)
    rule.append(1)
    assert allowed(rule, num_before=2) == [1, 2, 14]
    assert rule.allows(2)
    assert not rule.allows(14)
    rule.append(2)
    assert rule.allows(14)


def test_a_grammar_is_followed_to_its_end():
    rule = rules(grammar=Words())
    for token_id in (1, 2, 3):
        assert not rule.is_complete
        assert allowed(rule) == [token_id]
        rule.append(token_id)
    assert rule.is_complete


def test_every_request_has_its_own_matcher():
    grammar = Words()
    first, second = rules(grammar=grammar), rules(grammar=grammar)
    assert allowed(first) == [1]
    first.append(1)
    assert allowed(first) == [2]
    assert allowed(second) == [1]


@pytest.mark.parametrize(("ends", "expected"), [(EOS, [14, 15]), ((), []), ((15,), [15])])
def test_every_token_that_ends_the_answer_ends_a_grammar(ends, expected):
    rule = rules(grammar=Words(), ends=ends)
    for token_id in (1, 2, 3):
        rule.mask(2, num_before=0)
        rule.append(token_id)
    assert allowed(rule) == expected


def test_requests_without_masks_may_get_every_token():
    assert rules(logit_bias=((1, 1.0),)).allows(9)
