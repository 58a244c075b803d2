"""How large the KV cache of a device with memory of its own may be: what weights and steps leave.

What is free is asked when the weights are there. What a step takes is known once the largest one is
compiled, which is done for a cache of which nothing exists but its shape.
"""

from collections.abc import Iterable
from dataclasses import replace

import jax

from jaxengine.batch_layout import BatchLayout
from jaxengine.config import EngineConfig
from jaxengine.device_mesh import DeviceMesh
from jaxengine.errors import ModelError
from jaxengine.kv_cache import new_device_state
from jaxengine.model_runner import JaxModelRunner
from jaxengine.models.config import ModelConfig
from jaxengine.models.decoder import Decoder

__all__ = ["fitting_blocks", "free_bytes"]

# Of what is free: for results on their way, rules about tokens, and gaps between allocations.
KEPT_SHARE = 0.05

# A step is given its memory while the one before it may still hold its own.
STEPS_AT_ONCE = 2


def free_bytes(devices: Iterable[jax.Device]) -> int | None:
    """Return what each of these devices has free; None if they share the machine's memory."""
    own = [d for d in devices if d.process_index == jax.process_index()]
    stats = [device.memory_stats() or {} for device in own]
    if not all({"bytes_limit", "bytes_in_use"} <= found.keys() for found in stats):
        return None
    return min((found["bytes_limit"] - found["bytes_in_use"] for found in stats), default=None)


def fitting_blocks(
    decoder: Decoder,
    model: ModelConfig,
    config: EngineConfig,
    devices: DeviceMesh,
    *,
    free: int,
    block_bytes: int,
) -> int:
    """Return how many blocks, the reserved one included, fit beside the largest step.

    Args:
        decoder: with its weights, on the devices.
        model: what it looks like; of a shard, where there are several.
        config: of the engine, but for the number of blocks.
        devices: where it runs.
        free: bytes, on each device.
        block_bytes: of a block, on each device.

    Raises:
        ModelError: there is no room for any.
    """
    workspace = _largest_workspace(decoder, model, config, devices)
    num_blocks = int(free * (1 - KEPT_SHARE) - STEPS_AT_ONCE * workspace) // block_bytes
    if num_blocks < 2:
        raise ModelError(
            f"the weights leave {free} bytes of the device's memory free; steps take {workspace} "
            f"and two KV blocks {2 * block_bytes}. A smaller max_num_batched_tokens or "
            "max_num_seqs makes steps smaller"
        )
    # A context that any cache holds: it is the number of blocks that may be impossible.
    sized = replace(config, num_blocks=num_blocks, max_model_len=config.block_size)
    try:
        jax.eval_shape(lambda: new_device_state(model, sized))
    except ValueError:
        # The size that a kernel cannot address ends at twice the one where it begins.
        return num_blocks // 2
    return num_blocks


def _largest_workspace(
    decoder: Decoder, model: ModelConfig, config: EngineConfig, devices: DeviceMesh
) -> int:
    """Compile the largest step; return the bytes that it takes besides weights and state."""
    state = devices.describe_state(model, config)
    runner = JaxModelRunner(decoder, model, config, devices=devices, state=state)
    largest = max(runner.buckets)
    num_eos = len(model.eos_token_ids)
    layout = BatchLayout(largest, config.max_blocks_per_seq, num_eos, model.sliding_window)
    analyses = [
        lower(layout).compile().memory_analysis() for lower in (runner.lower, runner.lower_choice)
    ]
    return max((a.temp_size_in_bytes for a in analyses if a is not None), default=0)
