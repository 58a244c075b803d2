"""The default model against Hugging Face's logits and greedy answers for the same weights."""

import json

import numpy as np
import pytest

from engine_builder import Computed, default_decoder, warm_default_runner
from golden_model import GOLDEN_DIR
from jaxengine.sampling_params import SamplingParams

pytestmark = pytest.mark.model

# Largest differences of logits that reach 30: f32 sums in other orders through 30 layers.
TOLERANCE = 5e-4

# These may choose otherwise where the first two tokens' log-probabilities are this close.
MARGINS = {None: 0.1, "int8": 0.5}

PARIS = (504, 3575, 282, 4649, 314, 7042, 30, 2)


@pytest.fixture(scope="module")
def cases():
    return json.loads((GOLDEN_DIR / "golden_smollm2.json").read_text(encoding="utf-8"))["cases"]


def answers(dtype, cases, quantization=None):
    """Greedy answers to all prompts, served together."""
    params = [SamplingParams(max_tokens=len(case["output_ids"]), temperature=0) for case in cases]
    session = warm_default_runner(dtype, quantization).session()
    return session.run([c["prompt_ids"] for c in cases], params)


def test_f32_logits_are_those_of_hugging_face():
    golden = np.load(GOLDEN_DIR / "smollm2_logits.npz")
    decoder, model = default_decoder("float32")
    computed = Computed(decoder, model, "float32", max_len=16)
    logits = computed.step(golden["prompt"].tolist(), 0, num_tokens=16, num_seqs=8)
    top = np.take_along_axis(logits, golden["top_ids"], axis=1)
    np.testing.assert_allclose(top, golden["top_logits"], rtol=0, atol=TOLERANCE)
    # Nothing beyond the fifty that Hugging Face puts first comes before them.
    np.testing.assert_allclose(
        np.sort(logits, axis=1)[:, -50:][:, ::-1], golden["top_logits"], rtol=0, atol=TOLERANCE
    )
    shifted = logits.astype(np.float64)
    log_z = np.log(np.exp(shifted - shifted.max(1, keepdims=True)).sum(1)) + shifted.max(1)
    np.testing.assert_allclose(log_z, golden["log_z"], rtol=0, atol=TOLERANCE)


def test_f32_gives_every_golden_answer(cases):
    assert len(cases) == 12
    for case, answer in zip(cases, answers("float32", cases), strict=True):
        assert list(answer) == case["output_ids"], case["prompt"]


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_bf16_leaves_the_golden_answers_only_where_two_tokens_are_close(cases, quantization):
    for case, answer in zip(cases, answers("bfloat16", cases, quantization), strict=True):
        for token, golden, margin in zip(answer, case["output_ids"], case["margins"], strict=False):
            if token != golden:
                assert margin < MARGINS[quantization], case["prompt"]
                break


def test_bf16_knows_the_capital_of_france(cases):
    assert "capital of France" in cases[0]["prompt"]
    assert tuple(cases[0]["output_ids"]) == PARIS
    assert answers("bfloat16", cases[:1]) == [PARIS]
