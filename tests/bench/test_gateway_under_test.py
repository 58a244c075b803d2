from functools import partial

import pytest

from bench.gateway_under_test import GatewayFailed, GatewayUnderTest, random_tokenizer
from bench.paced_engine import paced_engine


@pytest.fixture
def gateway():
    make_engine = partial(
        paced_engine, num_streams=2, prompt_len=8, output_len=40, vocab_size=300, step_s=0.005
    )
    with GatewayUnderTest(make_engine, 300) as gateway:
        yield gateway


def test_a_token_costs_time_and_reaches_the_client(gateway):
    row = gateway.measure("sse", 2, 8, 40)
    assert row["output_tokens_per_s"] == pytest.approx(2 * 40 / row["seconds"])
    assert 0 <= row["loop_system_us_per_token"] <= row["loop_us_per_token"]
    assert row["loop_us_per_token"] > 0


def test_a_client_that_is_refused_is_an_error_with_its_words(gateway):
    with pytest.raises(GatewayFailed, match="context"):
        gateway.measure("sse", 1, 70, 1)


def test_the_tokenizer_has_a_text_for_every_token():
    tokenizer = random_tokenizer(512)
    texts = {tokenizer.token_bytes(token_id) for token_id in range(512)}
    assert tokenizer.vocab_size == len(texts) == 512
    assert b" ff" in texts
