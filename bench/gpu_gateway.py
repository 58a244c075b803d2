"""The gateway in front of an engine under test: tokens a second through websocket and SSE."""

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from bench.carrier_load import Carrier
from bench.gateway_under_test import GatewayUnderTest
from bench.gpu_engine import EngineUnderTest

__all__ = ["measure_gateway"]


def measure_gateway(
    engine: EngineUnderTest, streams: Sequence[int], *, prompt_len: int, output_len: int
) -> Iterator[dict[str, Any]]:
    """Measure the engine alone and through each carrier; a row for each, as it is done.

    Args:
        engine: whose model and programs serve.
        streams: how many at the same time; one measurement for each.
        prompt_len: tokens of each prompt.
        output_len: tokens of each answer.
    """
    with GatewayUnderTest(engine.serving, engine.model.vocab_size) as gateway:
        for num_streams in streams:
            alone = engine.run([(prompt_len, output_len)] * num_streams)
            alone_per_s = alone.output_tokens / alone.seconds
            about = {"streams": num_streams, "tokens": f"{prompt_len}/{output_len}"}
            yield {**about, "through": "engine alone", "output_tokens_per_s": alone_per_s}
            for carrier in get_args(Carrier):
                figures = gateway.measure(carrier, num_streams, prompt_len, output_len)
                share = figures["output_tokens_per_s"] / alone_per_s
                yield {**about, "through": carrier, **figures, "share_of_engine": share}
