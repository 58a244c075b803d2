"""Masks and caps by hand; test_triton.py and test_mosaic_gpu.py run the kernels that use them."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.gpu_scores import LOG2_E, Scoring


def test_a_query_sees_itself_and_what_is_in_its_window():
    scoring = Scoring(sliding_window=3)
    seen = scoring.visible(jnp.arange(8)[None], jnp.array([5, 1])[:, None])
    assert np.flatnonzero(seen[0]).tolist() == [3, 4, 5]
    assert np.flatnonzero(seen[1]).tolist() == [0, 1]
    assert scoring.first_visible(jnp.array([0, 2, 3, 5])).tolist() == [0, 0, 1, 3]


def test_without_a_window_it_sees_all_before_it():
    seen = Scoring().visible(jnp.arange(4), jnp.int32(2))
    assert seen.tolist() == [True, True, True, False]
    assert Scoring().first_visible(jnp.array([7])).tolist() == [0]


def test_a_query_is_where_its_last_split_ends():
    splits = jnp.array([[0, 0, 384], [0, 384, 513], [1, 128, 300]])
    starts = jnp.array([0, 2, 3])
    window = Scoring(sliding_window=600)
    assert window.query_position(splits, starts, 0, jnp.int32(384)) == 512
    assert window.query_position(splits, starts, 1, jnp.int32(300)) == 299
    assert Scoring().query_position(splits, starts, 0, jnp.int32(384)) == 383


@pytest.mark.parametrize("soft_cap", [0.1, 30.0, 50.0])
def test_scores_in_base_two_are_capped_as_those_in_base_e(soft_cap):
    scores = np.concatenate([np.linspace(-200, 200, 1001), [0.0, 1e-6, 1e6, -1e6, 2e38, -2e38]])
    capped = Scoring(soft_cap=soft_cap).cap(jnp.asarray(scores * LOG2_E, jnp.float32))
    expected = soft_cap * np.tanh(scores / soft_cap) * LOG2_E
    np.testing.assert_allclose(capped, expected, rtol=0, atol=soft_cap * 2**-21)


def test_without_a_cap_scores_stay():
    scores = jnp.array([1.0, -3e38])
    assert Scoring().cap(scores) is scores
