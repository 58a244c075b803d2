"""Log-probabilities and rules about tokens do not depend on how the engine came to compute them.

As in test_equivalence, with everything that a request may ask for besides its tokens. What the
log-probabilities must be is computed from the logits of the bare decoder, in double precision.
"""

import numpy as np
import pytest

from engine_builder import Computed, tiny_decoder, warm_tiny_runner
from jaxengine.sampling_params import SamplingParams

WAYS = {
    "together": {"overlap": False},
    "overlapped": {},
    "chunks of 16": {"max_num_scheduled_tokens": 16},
    "chunks of 1": {"max_num_scheduled_tokens": 1},
    "preempted": {"num_blocks": 24, "max_num_scheduled_tokens": 64},
    "preempted in the plain loop": {"num_blocks": 20, "overlap": False},
}
NUM_TOP = 5
EOS = 257  # of the tiny checkpoints


class Ladder:
    """A grammar and its matcher: token k leaves the remainder k when divided by 5; 12 tokens."""

    def __init__(self):
        self.num_accepted = 0

    def new_matcher(self):
        return Ladder()

    def mask(self):
        allowed = range(self.num_accepted % 5, 250, 5)
        return sum(1 << token_id for token_id in allowed).to_bytes(38, "little")

    def accept(self, token_id):
        assert token_id % 5 == self.num_accepted % 5
        self.num_accepted += 1

    @property
    def is_complete(self):
        return self.num_accepted == 12


OPTIONS = [
    {"temperature": 0, "logprobs": NUM_TOP, "prompt_logprobs": NUM_TOP},
    {"temperature": 0.8, "seed": 1, "presence_penalty": 1.5, "logprobs": 0},
    {"temperature": 0, "frequency_penalty": 0.5, "prompt_logprobs": 0},
    {"temperature": 0, "repetition_penalty": 1.4, "logit_bias": ((3, 4.0), (250, -100.0))},
    {"temperature": 0.8, "seed": 2, "allowed_token_ids": tuple(range(0, 250, 3))},
    {"temperature": 0, "bad_words": ((5,), (7, 9))},
    {"temperature": 0.8, "seed": 4, "grammar": Ladder()},
    {"temperature": 0.8, "top_p": 0.9, "seed": 3, "repetition_penalty": 0.9, "logprobs": 20},
    {
        "temperature": 0,
        "allowed_token_ids": (*range(0, 250, 7), EOS),
        "logit_bias": ((EOS, 100.0),),
        "min_tokens": 6,
        "ignore_eos": False,
    },
]


@pytest.fixture(scope="module")
def warm():
    return warm_tiny_runner("llama")


@pytest.fixture(scope="module")
def prompts(warm):
    rng = np.random.default_rng(8)
    ids = [rng.integers(0, warm.model.vocab_size, n).tolist() for n in (1, 7, 16, 33, 65, 90, 100)]
    return [*map(tuple, ids), (*ids[-1][:48], *ids[1]), (9, *ids[1])]


def params_of(options, max_tokens=14):
    return SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, **options})


def run(session, prompts, params):
    """Return (tokens, log-probabilities, prompt log-probabilities) of each request."""
    return [
        (out.new_token_ids, out.new_logprobs, out.prompt_logprobs)
        for out in session.run_outputs(prompts, params)
    ]


def alone(warm, prompts, params):
    return [
        run(warm.session(enable_prefix_caching=False, overlap=False), [prompt], [param])[0]
        for prompt, param in zip(prompts, params, strict=True)
    ]


def test_every_way_to_compute_gives_the_same(warm, prompts):
    params = [params_of(options) for options in OPTIONS]
    compiles_before = warm.runner.compiles_after_ready
    expected = alone(warm, prompts, params)
    for way, changes in WAYS.items():
        session = warm.session(**changes)
        assert run(session, prompts, params) == expected, way
        # Once more, with the prefixes in the cache: who wants the prompt's computes it again.
        assert run(session, prompts[::-1], params[::-1]) == expected[::-1], f"{way}, again"
        assert (session.stats.num_preemptions > 0) == ("preempted" in way), way
        assert session.stats.prefix_hits > 0, way
    assert warm.runner.compiles_after_ready == compiles_before


def test_log_probabilities_are_those_of_the_bare_decoder(warm, prompts):
    params = [params_of({"temperature": 0, "logprobs": NUM_TOP, "prompt_logprobs": NUM_TOP})]
    params *= len(prompts)
    for prompt, (tokens, logprobs, of_prompt) in zip(
        prompts, run(warm.session(), prompts, params), strict=True
    ):
        ids = [*prompt, *tokens]
        computed = Computed(*tiny_decoder("llama"), "float32", max_len=128)
        x = computed.step(ids, 0, num_tokens=128, num_seqs=8).astype(np.float64)
        x = x - x.max(-1, keepdims=True)
        expected = x - np.log(np.exp(x).sum(-1, keepdims=True))
        assert of_prompt[0] is None
        assert len(of_prompt) == len(prompt)
        assert len(logprobs) == len(tokens)
        for position, found in enumerate([*of_prompt[1:], *logprobs], 1):
            values = expected[position - 1]
            assert found.logprob == pytest.approx(values[ids[position]], abs=1e-4)
            top = np.sort(values)[::-1][:NUM_TOP]
            assert [value for _, value in found.top] == pytest.approx(top, abs=1e-4)
            assert [values[i] for i, _ in found.top] == pytest.approx(top, abs=1e-4)


def test_rules_hold(warm, prompts):
    results = run(warm.session(), prompts, [params_of(options) for options in OPTIONS])
    tokens = [found[0] for found in results]
    assert set(tokens[4]) <= set(range(0, 250, 3))
    assert 5 not in tokens[5]
    assert (7, 9) not in set(zip(tokens[5], tokens[5][1:], strict=False))
    assert 250 not in tokens[3]
    assert [token_id % 5 for token_id in tokens[6]] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert EOS not in tokens[8][:6]
    assert tokens[8][6:] == (EOS,)  # the likeliest of all, as soon as it may come


def test_a_bias_and_a_penalty_change_greedy_answers(warm, prompts):
    greedy = {"temperature": 0}
    plain, biased, penalized = (
        run(warm.session(), [prompts[3]], [params_of({**greedy, **options})])[0][0]
        for options in ({}, {"logit_bias": ((8, 100.0),)}, {"frequency_penalty": 2.0})
    )
    assert set(biased) == {8}
    assert plain != penalized
    assert len(set(penalized)) >= len(set(plain))


def test_a_dead_end_cuts_the_answer(warm, prompts):
    """The only token that is allowed is also a bad word."""
    options = {"temperature": 0, "allowed_token_ids": (5,), "bad_words": ((5, 5, 5),)}
    session = warm.session()
    [output] = session.run_outputs([prompts[2]], [params_of(options)])
    assert output.new_token_ids == (5, 5)
    assert output.finish_reason == "dead_end"
