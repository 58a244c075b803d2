import orjson
import pytest
from click.testing import CliRunner

from bench.comparison.figures import ProductLimit
from bench.comparison.limit import limit, matrix_weights
from golden_model import TINY_DIR
from jaxengine.models.config import ModelConfig

SMOLLM2 = ModelConfig(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=1e5,
)


def test_a_token_meets_every_matrix_once():
    # q, k, v, out; gate, up, down; and the output projection.
    layer = 576 * 576 + 2 * 192 * 576 + 576 * 576 + 3 * 576 * 1536
    assert matrix_weights(SMOLLM2) == 30 * layer + 49152 * 576


def test_the_limit_is_what_the_reference_computed():
    # 128 and 64 tokens of this model at 370 GFLOP/s: 457 tokens a second, at 650: 800.
    found = ProductLimit(bf16_gflops=370, int8_gflops=650, matrix_weights=matrix_weights(SMOLLM2))
    assert found.output_tokens_per_s(found.bf16_gflops, 128, 64) == pytest.approx(457, abs=2)
    assert found.output_tokens_per_s(found.int8_gflops, 128, 64) == pytest.approx(800, abs=6)


def test_rates_are_measured_and_printed():
    result = CliRunner().invoke(limit, [str(TINY_DIR / "llama")])
    assert result.exit_code == 0, result.output
    found = ProductLimit(**orjson.loads(result.stdout))
    assert found.bf16_gflops > 0
    assert found.int8_gflops > 0
    assert found.matrix_weights == 2 * (64 * (2 * 64 + 2 * 32) + 3 * 64 * 96) + 272 * 64
