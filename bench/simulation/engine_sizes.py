"""The engine that every replica of a fleet has: sizes that suit its device, unless told."""

import math
from dataclasses import dataclass
from typing import get_args

from bench.simulation.device import DeviceModel, RooflineDevice
from jaxengine.config import BatchingMode, EngineConfig, SchedulingPolicy
from kernels_pallas.kernel_names import AttentionKernel

__all__ = [
    "ATTENTION_KERNELS",
    "BATCHING_MODES",
    "SCHEDULING_POLICIES",
    "EngineSizes",
    "engine_for",
]

ATTENTION_KERNELS: tuple[AttentionKernel, ...] = get_args(AttentionKernel)
BATCHING_MODES: tuple[BatchingMode, ...] = get_args(BatchingMode)
SCHEDULING_POLICIES: tuple[SchedulingPolicy, ...] = get_args(SchedulingPolicy)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSizes:
    """What may be given; None takes what suits the device. Names as in EngineConfig."""

    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    watermark: float = 0.01
    batch_window_s: float = 0.05
    long_prefill_token_threshold: int = 0
    queue_timeout_s: float | None = None
    enable_prefix_caching: bool = True
    overlap: bool = True
    attention_kernel: AttentionKernel | None = None


def engine_for(device: DeviceModel, sizes: EngineSizes) -> EngineConfig:
    """Fill in what is not given.

    The kernel decides which sizes are compiled. An accelerator gets large steps and as many blocks
    as its memory holds; large blocks, because each is an object here. A calibrated device gets what
    `headrace serve` takes on a CPU, and blocks enough for every request at its longest.

    Raises:
        ValueError: the sizes contradict each other.
    """
    is_large = isinstance(device, RooflineDevice)
    max_model_len = sizes.max_model_len or (8192 if is_large else 2048)
    max_num_seqs = sizes.max_num_seqs or (256 if is_large else 64)
    block_size = sizes.block_size or (64 if is_large else 16)
    if sizes.num_blocks is not None:
        num_blocks = sizes.num_blocks
    elif isinstance(device, RooflineDevice):
        num_blocks = device.kv_capacity_tokens // block_size
    else:
        num_blocks = 1 + max_num_seqs * math.ceil(max_model_len / block_size)
    return EngineConfig(
        max_model_len=max_model_len,
        max_num_batched_tokens=sizes.max_num_batched_tokens or (2048 if is_large else 512),
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        num_blocks=num_blocks,
        watermark=sizes.watermark,
        batch_window_s=sizes.batch_window_s,
        long_prefill_token_threshold=sizes.long_prefill_token_threshold,
        queue_timeout_s=sizes.queue_timeout_s,
        enable_prefix_caching=sizes.enable_prefix_caching,
        overlap=sizes.overlap,
        attention_kernel=sizes.attention_kernel or ("mosaic_gpu" if is_large else "native"),
    )
