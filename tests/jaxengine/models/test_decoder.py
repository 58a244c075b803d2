"""The decoder against Hugging Face's logits, and against itself in other buckets."""

import numpy as np
import pytest

from decoder_bits import check_bits
from engine_builder import (
    Computed,
    decoder_of,
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
        ("bfloat16", "bfloat16", {"quantization": "fp8", **THREES}),
    ],
    ids=str,
)
def test_logits_and_cache_have_the_same_bits_in_every_cut_and_bucket(
    dtype, kv_cache_dtype, changes
):
    check_bits(*random_decoder(dtype, **changes), kv_cache_dtype)


# With biases and with norms of heads; Llama has neither.
@pytest.mark.parametrize(
    ("family", "quantization", "most"),
    [("qwen2", "int8", 0.1), ("qwen3", "int8", 0.1), ("qwen3", "fp8", 0.4)],
)
def test_weights_of_eight_bits_stay_close_to_hugging_face(family, quantization, most):
    golden = np.load(TINY_DIR / family / "golden.npz")
    files = open_checkpoint(tiny_model_files(family))
    decoder = decoder_of(files, "float32", quantization=quantization)
    prompt, expected = golden["prompt_0"], golden["logits_0"]
    logits = Computed(*decoder, "float32", max_len=96).step(prompt, 0, num_tokens=96, num_seqs=8)
    # Of 64 random numbers the largest is about 2.5 times the root of the mean square: half a step
    # of 127 adds an error of 0.6 % to each factor, so 0.8 % to a product; a dozen of them follow
    # each other: 3 % if all counted the same. Eight-bit floats are off by 2.6 % of themselves, so a
    # product by 3.7 %, and a dozen of them by 13 %.
    error = np.sqrt(((logits - expected) ** 2).mean() / (expected**2).mean())
    assert 0.001 < error < most
