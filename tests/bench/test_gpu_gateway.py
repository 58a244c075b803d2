import pytest

from bench.gpu_engine import MODELS, EngineUnderTest
from bench.gpu_gateway import measure_gateway
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


def test_every_carrier_is_compared_with_the_engine_alone(engine):
    rows = list(measure_gateway(engine, (1, 3), prompt_len=8, output_len=4))
    assert [(row["streams"], row["through"]) for row in rows] == [
        *[(1, "engine alone"), (1, "websocket"), (1, "sse")],
        *[(3, "engine alone"), (3, "websocket"), (3, "sse")],
    ]
    alone, websocket, sse = rows[3:]
    for row in (websocket, sse):
        # Every stream brings all of its tokens, or the measurement fails.
        assert row["output_tokens_per_s"] == pytest.approx(3 * 4 / row["seconds"])
        ratio = row["output_tokens_per_s"] / alone["output_tokens_per_s"]
        assert row["share_of_engine"] == pytest.approx(ratio)
        assert row["tokens_per_message"] >= 0.5
        assert 0 < row["engine_busy_share"] <= 1
