import jax
import pytest
from flax import nnx

from bench.gpu_engine import MODELS, EngineUnderTest, random_decoder
from compile_cache import use_compile_cache


@pytest.fixture(scope="module")
def engine():
    use_compile_cache()
    engine = EngineUnderTest(
        MODELS["tiny"],
        kernel="reference",
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=64,
    )
    yield engine
    engine.close()


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_every_request_gets_all_of_its_tokens(engine, batching):
    figures = engine.run([(8, 3), (20, 5), (1, 1)], batching=batching)
    assert (figures.prompt_tokens, figures.output_tokens) == (29, 9)
    assert figures.seconds > 0
    assert figures.steps >= 5
    assert 0 <= figures.waited_ms <= 1e3 * figures.seconds
    assert figures.device_ms is None


def test_of_requests_that_are_alike_a_step_is_measured_by_itself(engine):
    figures = engine.run([(8, 8)] * 3)
    assert figures.output_tokens == 24
    assert figures.device_ms > 0
    expected = max(0.0, 1 - figures.device_ms / figures.step_ms)
    assert figures.row()["gap_share"] == pytest.approx(expected)


def test_several_steps_at_once_are_counted_one_by_one():
    engine = EngineUnderTest(
        MODELS["tiny"],
        kernel="reference",
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=64,
        decode_steps=4,
    )
    one, four = (engine.run([(8, 9)] * 3, decode_steps=steps) for steps in (1, 4))
    engine.close()
    # A prompt and eight decodes.
    assert one.steps == four.steps == 9
    assert four.device_ms is None
    assert four.step_ms > 0


def test_a_token_of_a_prompt_meets_every_weight_but_the_embedding(engine):
    # Two layers: Q and O of 4 heads of 64, K and V of 2, and three matrices of 64 x 96. A product
    # and a sum for each; the norms are next to nothing.
    weights = 2 * (64 * 64 * (2 * 4 + 2 * 2) + 3 * 64 * 96)
    assert engine.flop_per_token == pytest.approx(2 * weights, rel=0.01)


def test_a_step_must_read_the_weights_and_the_context(engine):
    # A block of 16 tokens: 2 layers, K and V, 2 heads of 64, 2 bytes each.
    block_bytes = 16 * 2 * 2 * 2 * 64 * 2
    assert engine.floor_bytes(3, 32) == engine.weight_bytes + 3 * 2 * block_bytes


def test_weights_are_random_and_as_the_model_wants_them():
    state = nnx.state(random_decoder(MODELS["tiny"]))
    leaves = jax.tree.leaves(state)
    assert all(0.01 < float(leaf.astype(float).std()) < 0.03 for leaf in leaves)
