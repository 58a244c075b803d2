"""Losses on a tiny model, against Hugging Face's logits and against each other."""

import numpy as np
import pytest

from bench.logit_loss import (
    CHUNK,
    GoldenCase,
    LogitLoss,
    PagedDecoder,
    count_kept,
    longest_text,
    loss_cells,
    measure_losses,
    time_steps,
)
from engine_builder import tiny_decoder
from golden_model import TINY_DIR

DTYPES = ("float32", "int8", "fp8_e5m2")


@pytest.fixture(scope="module")
def golden():
    return np.load(TINY_DIR / "llama" / "golden.npz")


def paged(dtype, max_len):
    return PagedDecoder(*tiny_decoder("llama"), dtype, max_len=max_len)


@pytest.fixture(scope="module")
def losses(golden):
    # More than a chunk, and a second window that begins anew.
    prompt = golden["prompt_0"].tolist()
    max_len = len(prompt) * 10
    others = {dtype: paged(dtype, max_len) for dtype in DTYPES}
    return measure_losses(paged("float32", max_len), others, [prompt * 10, prompt])


def test_the_reference_loses_nothing(losses):
    exact = losses["float32"]
    assert not exact["max_error"].any()
    assert not exact["kl_divergence"].any()
    assert exact["agrees"].all()


def test_every_token_but_the_first_of_a_window_is_predicted(losses, golden):
    length = len(golden["prompt_0"])
    assert length * 10 - 1 > CHUNK
    for loss in losses.values():
        assert {len(values) for values in loss.values()} == {length * 11 - 2}


def test_surprise_is_that_of_hugging_face(losses, golden):
    """The second window is the golden prompt by itself."""
    prompt = golden["prompt_0"]
    logits = golden["logits_0"].astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -log_p[np.arange(len(prompt) - 1), prompt[1:]]
    surprise = losses["float32"]["surprise"][-len(expected) :]
    np.testing.assert_allclose(surprise, expected, rtol=0, atol=1e-4)


def test_a_coarser_dtype_loses_more(losses):
    fine, coarse = losses["int8"], losses["fp8_e5m2"]
    assert 0 < fine["mean_error"].mean() < coarse["mean_error"].mean()
    assert 0 < fine["kl_divergence"].mean() < coarse["kl_divergence"].mean()
    assert (coarse["max_error"] >= coarse["mean_error"]).all()


def test_golden_answers_are_counted_when_every_token_is_kept(golden):
    cases = [
        GoldenCase(tuple(golden[f"prompt_{i}"].tolist()), tuple(golden[f"greedy_{i}"].tolist()))
        for i in "01"
    ]
    decoder = paged("float32", longest_text([], cases))
    assert count_kept(decoder, cases) == 2
    wrong = GoldenCase(cases[0].prompt_ids, (*cases[0].output_ids[:-1], 7))
    assert count_kept(decoder, [wrong, cases[1]]) == 1


def test_the_longest_text_is_a_window_or_a_case():
    cases = [GoldenCase((1, 2, 3), (4, 5))]
    assert longest_text([[1] * 4], cases) == 5
    assert longest_text([[1] * 6, [1]], cases) == 6


def test_positions_are_summed_up_for_a_table():
    losses = {
        "max_error": [1.0, 3.0],
        "mean_error": [0.5, 0.25],
        "kl_divergence": [0.0, 0.01],
        "agrees": [1.0, 0.0],
        "surprise": [0.0, 2 * np.log(2)],
    }
    loss = LogitLoss.of({name: np.array(values) for name, values in losses.items()})
    assert loss == LogitLoss(3, 0.375, 0.005, 0.5, pytest.approx(2))
    assert loss_cells(loss) == ("0.3750", "3.00", "5.0e-03", "50.00%", "2.000")


def test_steps_of_every_dtype_are_timed():
    times = time_steps(*tiny_decoder("llama"), DTYPES, num_seqs=8, context=20, repeats=3)
    assert list(times) == list(DTYPES)
    for median_ms, fastest_ms in times.values():
        assert 0 < fastest_ms <= median_ms
