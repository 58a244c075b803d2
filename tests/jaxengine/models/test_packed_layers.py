"""Packed layers against those in JAX, and against themselves in other buckets."""

import jax
import numpy as np
import pytest

from attention_kernels import can_project, ready_kernel
from decoder_bits import check_bits
from engine_builder import (
    CodedCheckpoint,
    Computed,
    RandomCheckpoint,
    decoder_of,
    packed_decoder,
    random_decoder,
)

THREES = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64}


def test_packed_layers_in_a_loop_have_the_same_bits_in_every_cut_and_bucket():
    if not can_project():
        pytest.skip("no compiler here, or no instructions for bfloat16")
    check_bits(*packed_decoder(), "bfloat16")


def test_packed_layers_of_eight_bits_have_the_same_bits_in_every_cut_and_bucket():
    if ready_kernel() != "native":
        pytest.skip("no compiler here")
    check_bits(*packed_decoder(quantization="int8"), "bfloat16")


@pytest.mark.parametrize(
    "changes",
    [{}, {"model_type": "qwen2", "layers": 8}, {"model_type": "gemma2", "head": 4}],
    ids=["plain", "biases", "norms behind, GELU and soft caps"],
)
def test_weights_with_codes_give_the_bits_of_those_without(changes):
    if not can_project():
        pytest.skip("no compiler here, or no instructions for bfloat16")
    checkpoint = CodedCheckpoint(
        vocab_size=320, intermediate_size=160, num_hidden_layers=2, **{**THREES, **changes}
    )
    token_ids = np.random.default_rng(0).integers(0, 320, 48).tolist()
    coded, plain = (
        Computed(
            *decoder_of(checkpoint, "bfloat16", packed=True, keep_codes=keep_codes),
            "bfloat16",
            max_len=64,
        )
        for keep_codes in (True, False)
    )
    for first, end in ((0, 37), (37, 38), (38, 40), (40, 46), (46, 48)):
        some = token_ids[first:end]
        expected = plain.step(some, first, num_tokens=64, num_seqs=8)[: end - first]
        computed = coded.step(some, first, num_tokens=64, num_seqs=8)[: end - first]
        assert np.abs(expected).max() > 0.1
        np.testing.assert_array_equal(computed, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        # A loop of one layer without a window, and one of two with it.
        {
            "model_type": "qwen3",
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
        },
        {"model_type": "qwen2"},
        {"model_type": "gemma2", "num_hidden_layers": 2},
    ],
    ids=["plain", "windows and norms of heads", "biases", "norms behind, GELU and soft caps"],
)
def test_packed_weights_give_the_same_logits(changes):
    if not can_project():
        pytest.skip("no compiler here, or no instructions for bfloat16")
    checkpoint = RandomCheckpoint(vocab_size=320, **{**THREES, **changes})
    token_ids = np.random.default_rng(0).integers(0, 320, 40).tolist()
    plain, packed = (
        Computed(*decoder_of(checkpoint, "bfloat16", packed=packed), "bfloat16", max_len=64).step(
            token_ids, 0, num_tokens=64, num_seqs=8
        )
        for packed in (False, True)
    )
    # The same products, summed in another order; a sum may then round to another bfloat16.
    np.testing.assert_allclose(packed[:40], plain[:40], rtol=0, atol=0.02 * np.abs(plain).max())
    assert (packed[:40].argmax(-1) == plain[:40].argmax(-1)).mean() > 0.9


def test_packed_weights_of_eight_bits_give_the_same_logits():
    if ready_kernel() != "native":
        pytest.skip("no compiler here")
    checkpoint = RandomCheckpoint(vocab_size=320, intermediate_size=128, **THREES)
    token_ids = np.random.default_rng(0).integers(0, 320, 40).tolist()
    plain, packed = (
        Computed(
            *decoder_of(checkpoint, "bfloat16", packed=packed, quantization="int8"),
            "bfloat16",
            max_len=64,
        ).step(token_ids, 0, num_tokens=64, num_seqs=8)
        for packed in (False, True)
    )
    # The products have the same bits; what lies between is compiled into one program or another.
    np.testing.assert_allclose(packed, plain, rtol=0, atol=0.002 * np.abs(plain).max())


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_packed_decoder_picks_the_first_of_its_largest_logits(quantization):
    if not (can_project() if quantization is None else ready_kernel() == "native"):
        pytest.skip("no compiler here, or no instructions for these products")
    decoder, model = packed_decoder(quantization)
    assert decoder.can_pick_tokens
    hidden = np.random.default_rng(0).standard_normal((40, model.hidden_size), np.float32)
    wanted = np.arange(40) % 5 != 2
    picked = jax.jit(lambda x: decoder.pick_tokens(x, wanted_S=wanted))(hidden)
    logits = np.asarray(jax.jit(decoder.logits)(hidden))
    np.testing.assert_array_equal(picked, np.where(wanted, logits.argmax(axis=1), 0))


def test_no_tokens_are_picked_without_packed_weights_or_through_a_soft_cap():
    plain, _ = random_decoder("bfloat16")
    gemma = {"model_type": "gemma2", "final_logit_softcapping": 30.0}
    checkpoint = RandomCheckpoint(vocab_size=320, **{**THREES, **gemma})
    capped, _ = decoder_of(checkpoint, "bfloat16", packed=True)
    assert not plain.can_pick_tokens
    assert not capped.can_pick_tokens
