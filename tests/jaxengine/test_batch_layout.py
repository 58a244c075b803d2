"""What the host writes into a step's buffer is what the device finds in it."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.batch_layout import BatchLayout
from jaxengine.buckets import Bucket

LAYOUT = BatchLayout(Bucket(8, 4, False), 3, 2)


def test_the_views_of_a_layout_share_its_buffer_without_gaps():
    packed = np.arange(LAYOUT.size, dtype=np.int32)
    flat = np.concatenate([view.reshape(-1) for view in LAYOUT.views(packed).values()])
    np.testing.assert_array_equal(flat, packed)


def test_the_layers_find_what_was_written():
    packed = np.zeros(LAYOUT.size, np.int32)
    views = LAYOUT.views(packed)
    views["token_ids"][:] = range(8)
    views["block_tables"][:] = np.arange(12).reshape(4, 3)
    views["num_decodes"][...] = 3
    views["any_targets"][...] = 1
    batch = LAYOUT.unpack(packed)
    assert batch.token_ids.tolist() == list(range(8))
    assert batch.attention.block_tables.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert int(batch.attention.num_decodes) == 3
    assert bool(batch.any_targets)
    assert batch.targets.shape == (8,)


def test_the_end_of_the_buffer_says_how_tokens_are_chosen():
    packed = np.zeros(LAYOUT.size, np.int32)
    views = LAYOUT.views(packed)
    views["rows"][:] = [5, 6, 7, 8]
    views["temperature"].view(np.float32)[:] = [0.5, 1, 0, 2]
    views["presence_penalty"].view(np.float32)[:] = [0, 0, -1.5, 0]
    views["any_masked"][...] = 1
    batch = LAYOUT.choice.unpack(packed[-LAYOUT.choice.size :])
    assert batch.rows.tolist() == [5, 6, 7, 8]
    assert batch.sampling.temperature.tolist() == [0.5, 1, 0, 2]
    assert batch.rules.presence_penalty.tolist() == [0, 0, -1.5, 0]
    assert bool(batch.rules.any_masked)
    assert not bool(batch.any_logprobs)


@pytest.mark.parametrize("flag", ["", "any_filtered"])
def test_sequences_that_ask_for_nothing_take_their_largest_logit(flag):
    assert takes_largest(flag)


@pytest.mark.parametrize(
    "flag",
    ["any_random", "any_suppressed", "any_biased", "any_penalized", "any_masked", "any_logprobs"],
)
def test_one_that_asks_for_more_needs_all_logits(flag):
    assert not takes_largest(flag)


def takes_largest(flag):
    packed = np.zeros(LAYOUT.size, np.int32)
    if flag:
        LAYOUT.views(packed)[flag][...] = 1
    return bool(LAYOUT.choice.unpack(packed[-LAYOUT.choice.size :]).takes_largest)


def test_buckets_with_as_many_sequences_end_alike():
    other = BatchLayout(Bucket(64, 4, False), 99, 2)
    assert other.choice == LAYOUT.choice
    assert BatchLayout(Bucket(8, 8, True), 3, 2).choice != LAYOUT.choice


@pytest.mark.parametrize("keep", [True, False])
def test_a_choice_can_be_told_to_sample_nothing(keep):
    packed = np.zeros(LAYOUT.size, np.int32)
    views = LAYOUT.views(packed)
    views["rows"][:] = [0, 1, 2, 3]
    views["top_k"][:] = [5, 6, 7, 8]
    choice = jnp.asarray(packed[-LAYOUT.choice.size :])
    batch = LAYOUT.choice.unpack(LAYOUT.choice.keep_rows(choice, jnp.bool_(keep), spare_row=9))
    assert batch.rows.tolist() == ([0, 1, 2, 3] if keep else [9] * 4)
    assert batch.sampling.top_k.tolist() == [5, 6, 7, 8]
