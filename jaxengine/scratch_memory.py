"""What the native library keeps for itself in a server: memory that XLA does not know of."""

import jax

from jaxengine.buckets import buckets_for
from jaxengine.config import EngineConfig
from jaxengine.device_mesh import DeviceMesh
from jaxengine.host_threads import num_device_threads
from jaxengine.kv_cache import resolve_kv_cache_dtype
from jaxengine.models.config import ModelConfig
from kernels_pallas.native_memory import LayerSizes, call_bytes, worker_bytes

__all__ = ["scratch_bytes"]


def scratch_bytes(
    model: ModelConfig, config: EngineConfig, devices: DeviceMesh, *, packed: bool
) -> int:
    """Return the bytes that are kept at most: for a call, and by all threads for their part of one.

    Where a host has several devices, the threads' part is divided among them.

    Args:
        model: to serve, or a shard of it.
        config: of the engine, with the native kernel.
        devices: where it runs.
        packed: whether the layers run in the library, not its attention alone.
    """
    sizes = LayerSizes(
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        vocab_size=model.vocab_rows,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        weights=("int8" if config.quantization == "int8" else "bfloat16") if packed else None,
        block_size=config.block_size,
        kv_cache_dtype=resolve_kv_cache_dtype(config.kv_cache_dtype, config.dtype),
    )
    buckets = buckets_for(config)
    call = call_bytes(
        sizes,
        num_tokens=max(bucket.num_tokens for bucket in buckets),
        num_rows=max(bucket.num_seqs for bucket in buckets),
    )
    own = len([d for d in devices.devices if d.process_index == jax.process_index()])
    return call + num_device_threads() * worker_bytes(sizes) // own
