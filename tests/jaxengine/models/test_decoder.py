"""The decoder against Hugging Face's logits, and against itself in other buckets."""

import jax
import numpy as np
import pytest

from attention_kernels import can_project, ready_kernel
from engine_builder import (
    Computed,
    RandomCheckpoint,
    decoder_of,
    packed_decoder,
    random_decoder,
    tiny_decoder,
)
from golden_model import (
    TINY_DIR,
    TINY_FAMILIES,
    TINY_GGUF_ARCHITECTURES,
    tiny_gguf_files,
    tiny_model_files,
)
from jaxengine.weights.checkpoint import open_checkpoint

# Logits reach 16. Two f32 implementations that sum in other orders differ in the last digits.
TOLERANCE = 5e-5

THREES = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64}


def check_against_hugging_face(decoder, model, family):
    """One pass over prompt and golden answer: all logits, and each greedy token after the last."""
    golden = np.load(TINY_DIR / family / "golden.npz")
    for name in "01":
        prompt, answer = golden[f"prompt_{name}"], golden[f"greedy_{name}"]
        token_ids = [*prompt, *answer]
        computed = Computed(decoder, model, "float32", max_len=96)
        logits = computed.step(token_ids, 0, num_tokens=96, num_seqs=8)
        np.testing.assert_allclose(
            logits[: len(prompt)], golden[f"logits_{name}"], rtol=0, atol=TOLERANCE
        )
        np.testing.assert_array_equal(logits[len(prompt) - 1 : -1].argmax(-1), answer)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_logits_and_greedy_tokens_are_those_of_hugging_face(family):
    check_against_hugging_face(*tiny_decoder(family), family)


@pytest.mark.parametrize("architecture", TINY_GGUF_ARCHITECTURES)
def test_the_same_weights_as_gguf_give_the_same_answers(architecture):
    decoder, model = decoder_of(open_checkpoint(tiny_gguf_files(architecture)), "float32")
    check_against_hugging_face(decoder, model, architecture)


# Each dtype of the cache, each family and each number of query heads per kv head, not each with
# each: a program takes more than a second to compile, three of them a case. The attention has its
# bits compared with all of them in test_ragged_paged_attention_bits.
@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "changes"),
    [
        ("float32", "float32", {"model_type": "qwen3", "tie_word_embeddings": False}),
        ("float32", "int8", THREES),
        ("bfloat16", "bfloat16", THREES),
        ("bfloat16", "float16", {"model_type": "qwen2", "num_key_value_heads": 4}),
        ("bfloat16", "fp8_e4m3", {"num_attention_heads": 4, "num_key_value_heads": 1}),
        ("bfloat16", "fp8_e5m2", {"num_attention_heads": 4, "num_key_value_heads": 2}),
        ("bfloat16", "int8", {"quantization": "int8", **THREES}),
        ("float32", "float32", {"quantization": "int8", "model_type": "qwen2"}),
    ],
    ids=str,
)
def test_logits_and_cache_have_the_same_bits_in_every_cut_and_bucket(
    dtype, kv_cache_dtype, changes
):
    check_bits(*random_decoder(dtype, **changes), kv_cache_dtype)


def test_packed_layers_in_a_loop_have_the_same_bits_in_every_cut_and_bucket():
    if not can_project():
        pytest.skip("no compiler here, or no instructions for bfloat16")
    check_bits(*packed_decoder(), "bfloat16")


def test_packed_layers_of_eight_bits_have_the_same_bits_in_every_cut_and_bucket():
    if ready_kernel() != "native":
        pytest.skip("no compiler here")
    check_bits(*packed_decoder(quantization="int8"), "bfloat16")


def check_bits(decoder, model, kv_cache_dtype):
    """Logits and cache of a text that is computed whole, token by token, and in other pieces."""
    token_ids = np.random.default_rng(1).integers(0, model.vocab_size, 150).tolist()

    def compute(cut, **bucket):
        computed = Computed(decoder, model, kv_cache_dtype, max_len=160)
        logits, start = [], 0
        for size in cut:
            logits.append(computed.step(token_ids[start : start + size], start, **bucket))
            start += size
        # Block 0 of each layer takes the padding; nobody reads it.
        arrays = [
            np.asarray(array.astype("float32")).reshape(model.num_layers, -1, *array.shape[1:])
            for array in jax.tree.leaves(computed.kv_cache)
        ]
        return np.concatenate(logits), [array[:, 1:] for array in arrays]

    whole = compute([150], num_tokens=160, num_seqs=8)
    for cut, bucket in [
        ([1] * 150, {"num_tokens": 8, "num_seqs": 8}),
        ([64, 1, 1, 3, 65, 16], {"num_tokens": 100, "num_seqs": 20}),
    ]:
        logits, cache = compute(cut, **bucket)
        np.testing.assert_array_equal(logits, whole[0])
        for array, expected in zip(cache, whole[1], strict=True):
            np.testing.assert_array_equal(array, expected)


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
    ],
    ids=["plain", "windows"],
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


# With biases and with norms of heads; Llama has neither.
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_weights_of_eight_bits_stay_close_to_hugging_face(family):
    golden = np.load(TINY_DIR / family / "golden.npz")
    decoder = decoder_of(open_checkpoint(tiny_model_files(family)), "float32", quantization="int8")
    prompt, expected = golden["prompt_0"], golden["logits_0"]
    logits = Computed(*decoder, "float32", max_len=96).step(prompt, 0, num_tokens=96, num_seqs=8)
    # Of 64 random numbers the largest is about 2.5 times the root of the mean square: half a step
    # of 127 adds an error of 0.6 % to each factor, so 0.8 % to a product; a dozen of them follow
    # each other: 3 % if all counted the same.
    error = np.sqrt(((logits - expected) ** 2).mean() / (expected**2).mean())
    assert 0.001 < error < 0.1
