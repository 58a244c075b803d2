"""Sampling against what sorting in numpy says, and against the statistics of many draws."""

import sys
from functools import partial

import jax
import numpy as np
import pytest

from attention_kernels import ready_kernel
from compile_cache import use_compile_cache
from jaxengine import sampling
from jaxengine.batch_layout import SamplingBatch
from jaxengine.sampling import NUM_CANDIDATES, sample, suppress

NUM_SEQS = 256  # rows of one call; the same distribution at as many positions
NUM_SUPPRESSED = 4
NUM_DRAWS = 6400
RARE = 0.004  # a token this likely is missed by that many draws once in 10^11


@partial(jax.jit, static_argnames="native")
def sample_by(logits, batch, *, native):
    wanted = np.ones(len(logits), bool)
    suppressed = suppress(logits, batch.suppressed_ids)
    return sample(suppressed, batch, wanted_S=wanted, native=native)


@pytest.fixture(autouse=True, params=["xla", "native"])
def implementation(request, monkeypatch):
    """Every test runs with both."""
    use_compile_cache()
    native = request.param == "native"
    if native and ready_kernel() != "native":
        pytest.skip("no compiler here")
    monkeypatch.setattr(sys.modules[__name__], "sample_jit", partial(sample_by, native=native))


sample_jit = None  # as the fixture has it


def make_batch(rows):
    """One dict of parameters per sequence; what a dict lacks is off."""
    count = len(rows)
    batch = {
        "temperature": np.array([row.get("temperature", 1.0) for row in rows], np.float32),
        "top_k": np.array([row.get("top_k", 0) for row in rows], np.int32),
        "top_p": np.array([row.get("top_p", 1.0) for row in rows], np.float32),
        "min_p": np.array([row.get("min_p", 0.0) for row in rows], np.float32),
        "seed": np.array([divmod(row.get("seed", 0), 2**32) for row in rows], np.uint32).view(
            np.int32
        ),
        "position": np.array([row.get("position", 0) for row in rows], np.int32),
    }
    suppressed = np.full((count, NUM_SUPPRESSED), -1, np.int32)
    for row, ids in zip(suppressed, (row.get("suppressed_ids", ()) for row in rows), strict=True):
        row[: len(ids)] = ids
    filtered = (batch["top_k"] > 0) | (batch["top_p"] < 1) | (batch["min_p"] > 0)
    return SamplingBatch(
        **batch,
        suppressed_ids=suppressed,
        any_random=np.bool_((batch["temperature"] > 0).any()),
        any_filtered=np.bool_(filtered.any()),
        any_suppressed=np.bool_((suppressed >= 0).any()),
    )


def draw(logits, count=NUM_DRAWS, **params):
    """Draw `count` tokens from one distribution, at as many positions."""
    drawn = []
    for first in range(0, count, NUM_SEQS):
        rows = [{**params, "position": first + i} for i in range(NUM_SEQS)]
        drawn.append(sample_jit(np.tile(logits, (NUM_SEQS, 1)), make_batch(rows)))
    return np.concatenate(drawn)


def kept_tokens(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Ids and probabilities of what may be drawn, by sorting; ties with the last one stay."""
    x = logits.astype(np.float64) / temperature
    kept = np.ones(len(x), bool)
    if top_k:
        kept = x >= np.sort(x)[::-1][:top_k][-1]
    if top_p < 1:
        p = np.where(kept, np.exp(x - x.max()), 0)
        p /= p.sum()
        descending = np.sort(p)[::-1]
        last = np.searchsorted(np.cumsum(descending), top_p)
        kept &= p >= descending[last]
    kept &= x >= x.max() + np.log(max(min_p, 1e-300))
    p = np.where(kept, np.exp(x - x.max()), 0)
    return set(np.flatnonzero(kept).tolist()), p / p.sum()


def check_draws(logits, **params):
    kept, p = kept_tokens(logits, **params)
    drawn = set(draw(logits, **params).tolist())
    assert drawn <= kept
    assert {token for token in kept if p[token] > RARE} <= drawn


# Neighbours in the order differ by 1/200, far more than f32 rounds.
SPREAD = np.random.default_rng(0).permutation(400).astype(np.float32) / 200
PEAKED = SPREAD * 8


@pytest.mark.parametrize("logits", [SPREAD, PEAKED], ids=["spread", "peaked"])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": NUM_CANDIDATES},
        {"top_k": NUM_CANDIDATES + 1},
        {"top_k": 399},
        {"top_k": 400},
        {"top_k": 401},
        {"top_k": 2**31 - 1},
        {"top_p": 1e-6},
        {"top_p": 0.1},
        {"top_p": 0.5},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"min_p": 0.3},
        {"min_p": 1.0},
        {"top_k": 50, "top_p": 0.9},
        {"top_k": 300, "top_p": 0.95},
        {"top_p": 0.9, "min_p": 0.4},
        {"top_k": 300, "top_p": 0.9, "min_p": 0.2},
        {"temperature": 0.3, "top_p": 0.8},
        {"temperature": 5.0, "top_k": 20, "min_p": 0.5},
    ],
    ids=str,
)
def test_exactly_the_tokens_that_sorting_keeps_are_drawn(logits, params):
    check_draws(logits, **params)


@pytest.mark.parametrize(
    "params", [{"top_p": 0.7}, {"top_p": 0.9999}, {"top_k": 300}, {"min_p": 1}]
)
def test_a_flat_distribution_is_one_tie_and_stays_whole(params):
    assert set(draw(np.zeros(400, np.float32), **params).tolist()) == set(range(400))


def test_ties_with_the_last_token_stay():
    logits = np.full(400, -20, np.float32)
    logits[[5, 17, 300, 399]] = [3, 2, 2, 2]
    assert set(draw(logits, 768, top_k=2).tolist()) == {5, 17, 300, 399}
    assert set(draw(logits, 768, top_p=0.6).tolist()) == {5, 17, 300, 399}
    assert set(draw(logits, 768, top_p=0.4).tolist()) == {5}


def test_a_vocabulary_smaller_than_the_candidates_is_sampled_all_the_same():
    logits = np.array([1, 2, 3, 2.5, 0, -1, 2.2, 0.5], np.float32)
    for params in ({"top_k": 3}, {"top_k": 100}, {"top_p": 0.7}, {"min_p": 0.2}):
        check_draws(logits, **params)


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 2.0}, {"top_k": 5}, {"top_p": 0.85}], ids=str
)
def test_draws_follow_the_distribution(params):
    """Chi-square: 7 degrees of freedom at most exceed 40 once in a million."""
    logits = np.array([1, 2, 3, 2.5, 0, -1, 2.2, 0.5], np.float32)
    _, p = kept_tokens(logits, **params)
    count = NUM_DRAWS
    seen = np.bincount(draw(logits, count, seed=1234, **params), minlength=8)
    expected = p * count
    likely = expected > 0
    assert not seen[~likely].any()
    assert (((seen - expected) ** 2)[likely] / expected[likely]).sum() < 40


def test_draws_with_different_seeds_follow_the_distribution_too():
    """The same position, many seeds: neither half of a seed may be ignored."""
    logits = np.array([1, 2, 3, 2.5, 0, -1, 2.2, 0.5], np.float32)
    _, p = kept_tokens(logits)
    for scale in (1, 2**32):
        drawn = []
        for first in range(0, NUM_DRAWS, NUM_SEQS):
            rows = [{"seed": (first + i) * scale, "position": 5} for i in range(NUM_SEQS)]
            drawn.append(sample_jit(np.tile(logits, (NUM_SEQS, 1)), make_batch(rows)))
        seen = np.bincount(np.concatenate(drawn), minlength=8)
        assert ((seen - p * NUM_DRAWS) ** 2 / (p * NUM_DRAWS)).sum() < 40


def test_greedy_takes_the_first_of_the_largest():
    logits = np.zeros((3, 400), np.float32)
    logits[0, [350, 20, 21]] = 5
    logits[1, 0] = -1
    logits[2, 399] = 1e-6
    rows = [{"temperature": 0.0}] * 3
    assert sample_jit(logits, make_batch(rows)).tolist() == [20, 1, 399]


def test_greedy_rows_are_greedy_among_random_ones():
    logits = np.random.default_rng(1).standard_normal((8, 400), np.float32)
    rows = [{"temperature": 0.0, "top_p": 0.0}, {"temperature": 2.0, "top_p": 0.9}] * 4
    assert sample_jit(logits, make_batch(rows))[::2].tolist() == logits[::2].argmax(-1).tolist()


def test_rows_without_any_number_still_give_ids_of_the_vocabulary():
    logits = np.full((8, 400), np.nan, np.float32)
    tokens = np.asarray(sample_jit(logits, make_batch([{"temperature": 0.0}, {"top_k": 3}] * 4)))
    assert ((tokens >= 0) & (tokens < 400)).all()


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 5}, {"top_p": 0.9}, {"temperature": 0.0}], ids=str
)
def test_suppressed_ids_are_never_drawn(params):
    logits = np.zeros(400, np.float32)
    logits[[3, 399, 7]] = [10, 9, 8]
    drawn = draw(logits, 768, suppressed_ids=(3, 399), **params)
    assert not {3, 399} & set(drawn.tolist())
    assert 7 in drawn


def test_suppression_is_by_row():
    logits = np.zeros((8, 400), np.float32)
    logits[:, 3] = 10
    rows = [{"temperature": 0.0, "suppressed_ids": ids} for ids in [(3,), ()] * 4]
    assert sample_jit(logits, make_batch(rows)).tolist() == [0, 3] * 4


ROWS = [
    {"seed": 1, "position": 10},
    {"seed": 2**64 - 1, "position": 11, "top_p": 0.9},
    {"seed": 2**63, "position": 0, "top_k": 40},
    {"seed": 7, "position": 99_999, "top_k": 300, "top_p": 0.99},
    {"seed": 5, "position": 3, "temperature": 0.7, "top_p": 0.9999},
    {"seed": 9, "position": 4, "min_p": 0.1, "suppressed_ids": (1, 2)},
    {"seed": 8, "position": 5, "temperature": 1.7, "top_p": 0.5, "min_p": 0.01},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("vocab", [300, 49_152])
def test_a_token_does_not_depend_on_the_other_rows_or_their_number(vocab):
    """The same logits, parameters, seed and position: alone, together, and among strangers."""
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((8, vocab), np.float32) * 2

    def tokens(order, num_seqs):
        strange = rng.standard_normal((num_seqs - len(order), vocab), np.float32)
        rows = [
            *(ROWS[i] for i in order),
            *({"top_p": 0.8, "seed": i} for i in range(len(strange))),
        ]
        sampled = sample_jit(np.concatenate([logits[list(order)], strange]), make_batch(rows))
        return np.asarray(sampled)[: len(order)].tolist()

    together = tokens(range(8), 8)
    for index in range(8):
        assert tokens([index], 8) == [together[index]]
    assert tokens(range(8), 24) == together
    assert tokens(range(7, -1, -1), 24) == together[::-1]


def test_the_seed_and_the_position_both_matter():
    logits = np.zeros((8, 400), np.float32)
    variants = [(1, 1), (1, 2), (2, 1), (2**32 + 1, 1), (2**63 + 1, 1), (1, 1)]
    rows = [{"seed": seed, "position": position} for seed, position in variants] + [{}, {}]
    *first, again = sample_jit(logits, make_batch(rows)).tolist()[:6]
    assert len(set(first)) == 5
    assert again == first[0]


def test_rows_that_are_not_wanted_change_nothing():
    logits = np.zeros((4, 400), np.float32)
    logits[range(4), [5, 6, 7, 8]] = 1
    batch = make_batch([{"temperature": 0.0}] * 4)
    wanted = np.array([True, False, True, False])
    native = sample_jit.keywords["native"]
    sampled = np.asarray(sample(logits, batch, wanted_S=wanted, native=native))
    assert sampled[wanted].tolist() == [5, 7]


def test_uniform_numbers_are_in_the_middle_of_their_part():
    """Of 2^23: with 0, one draw in eight million would be the first token, however unlikely."""
    seeds = np.arange(2000, dtype=np.int32).reshape(1000, 2)
    uniform = np.asarray(jax.vmap(sampling._uniform)(seeds, np.arange(1000)), np.float64)
    assert ((uniform * 2**24) % 2 == 1).all()
    assert (uniform < 1).all()
