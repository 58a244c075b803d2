"""Small fleets and traces for tests of the simulator: one second a step, requests by hand."""

from collections.abc import Sequence

import numpy as np

from bench.simulation.device import FixedDevice
from bench.simulation.fleet import Fleet
from bench.simulation.workload import Trace
from jaxengine.config import EngineConfig

__all__ = ["small_config", "small_fleet", "trace_of"]


def small_config(**changes) -> EngineConfig:
    """16 blocks of 8 tokens, 4 requests, 16 tokens a step, no overlap."""
    defaults = {
        "max_model_len": 64,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
        "block_size": 8,
        "num_blocks": 17,
        "watermark": 0.0,
        "overlap": False,
    }
    return EngineConfig(**(defaults | changes))


def small_fleet(num_replicas: int = 1, *, router: str = "round-robin", **changes) -> Fleet:
    return Fleet(
        config=small_config(**changes),
        device=FixedDevice(seconds=1.0),
        num_replicas=num_replicas,
        router=router,
    )


def trace_of(requests: Sequence[tuple[float, int, int]], **columns: Sequence[int]) -> Trace:
    """From (arrival, prompt tokens, output tokens); each its own conversation unless told."""
    count = len(requests)
    zeros = [0] * count

    def column(name: str, default: Sequence[int]) -> np.ndarray:
        return np.array(columns.get(name, default), dtype=np.int64)

    return Trace(
        arrival_s=np.array([arrival_s for arrival_s, _, _ in requests]),
        prompt_len=np.array([prompt for _, prompt, _ in requests]),
        output_len=np.array([output for _, _, output in requests]),
        prefix_len=column("prefix_len", zeros),
        group=column("group", zeros),
        session=column("session", range(count)),
        tenant=column("tenant", zeros),
        priority=column("priority", zeros),
    )
