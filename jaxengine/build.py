"""From a model's files and an operator's wishes to an engine that is ready to start."""

import sys
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
from flax import nnx

from jaxengine.async_engine import AsyncEngine
from jaxengine.config import EngineConfig
from jaxengine.device_mesh import DeviceMesh, open_mesh
from jaxengine.engine_core import EngineCore
from jaxengine.engine_options import EngineOptions
from jaxengine.errors import ModelError
from jaxengine.free_memory import fitting_blocks, free_bytes
from jaxengine.kv_cache import kv_block_bytes, resolve_kv_cache_dtype
from jaxengine.model_runner import JaxModelRunner
from jaxengine.models.config import ModelConfig
from jaxengine.models.decoder import Decoder
from jaxengine.models.loader import CodeSource, load_decoder
from jaxengine.models.shard_loader import load_shards
from jaxengine.models.sharding import shard_of
from jaxengine.processes import ProcessGroup
from jaxengine.scratch_memory import scratch_bytes
from jaxengine.step_time import StepTimeModel
from jaxengine.token_engine import EngineLimits
from jaxengine.weights.source import cache_dir
from kernels_pallas import fp8, native
from kernels_pallas.choice import KernelChoice, choose_kernel, default_block_size, kernels_dir
from kernels_pallas.gpu_choice import GpuUse
from kernels_pallas.kernel_names import AttentionKernel

__all__ = ["BuiltEngine", "MemoryUse", "build_engine", "plan_engine"]

# The default of `kv_cache_memory_bytes` where the device has the machine's memory: enough for
# dozens of chats with a small model, little enough for a laptop. Capped at a quarter of the memory.
DEFAULT_KV_CACHE_BYTES = 1 << 30

Progress = Callable[[int, int], None]


class CheckpointSource(CodeSource, Protocol):
    """A checkpoint: tensors and the configuration."""

    @property
    def hf_config(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Where the memory goes, in bytes; of each device, where several share the model.

    Attributes:
        weights: of the model, or of a shard, as they are on the device.
        codes: what weights are kept as besides (`EngineOptions.keep_codes`).
        kv_cache: of all blocks, the reserved one included.
        workspace: what the largest step takes besides, and what all steps share.
        scratch: what the native library keeps at most.
        available: memory of the device.
    """

    weights: int
    codes: int
    kv_cache: int
    workspace: int
    scratch: int
    available: int

    @property
    def total(self) -> int:
        return self.weights + self.codes + self.kv_cache + self.workspace + self.scratch


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltEngine:
    """A warm engine and the facts that were decided on the way.

    Attributes:
        clamped_from: max_model_len as asked or as trained, if the KV cache cannot hold it.
        num_buckets: compiled programs.
        attention: the kernel of the attention, and why it.
        shard: what each of `devices` has of the model; the model itself, where it is one.
        runner: the device side of `engine`.
    """

    engine: AsyncEngine
    model: ModelConfig
    shard: ModelConfig
    config: EngineConfig
    clamped_from: int | None
    num_buckets: int
    memory: MemoryUse
    attention: KernelChoice
    devices: DeviceMesh
    runner: JaxModelRunner


def plan_engine(
    options: EngineOptions,
    model: ModelConfig,
    *,
    memory_bytes: int,
    kernel: AttentionKernel = "reference",
) -> tuple[EngineConfig, int | None]:
    """Turn wishes into a consistent configuration.

    Args:
        options: the wishes.
        model: the model to serve, or a shard of it.
        memory_bytes: memory of a device, less what steps take of it.
        kernel: the attention that serves.

    Returns:
        The configuration, and what max_model_len was before it was clamped to the KV cache.

    Raises:
        ModelError: the model's context is shorter than asked for, or the cache holds nothing or
            exceeds the memory.
        ValueError: an option is out of range.
    """
    block_bytes = _block_bytes(options, model, kernel)
    num_usable = options.num_kv_blocks
    if num_usable is None:
        num_usable = _cache_bytes(options, memory_bytes) // block_bytes - 1  # one is reserved
    if num_usable < 1:
        raise ModelError(
            f"kv_cache_memory_bytes must be at least {2 * block_bytes}: "
            f"2 blocks of {block_bytes} bytes, one of them reserved"
        )
    if (num_usable + 1) * block_bytes > memory_bytes:
        raise ModelError(
            f"a KV cache of {num_usable} blocks of {block_bytes} bytes exceeds the memory "
            f"of {memory_bytes} bytes that there is for it"
        )
    wanted = options.max_model_len or model.max_position_embeddings
    if wanted > model.max_position_embeddings:
        raise ModelError(
            f"max_model_len {wanted} exceeds the model's context of "
            f"{model.max_position_embeddings} tokens"
        )
    max_model_len = min(wanted, num_usable * _block_size(options))
    config = EngineConfig(
        dtype=options.dtype,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        attention_kernel=kernel,
        max_model_len=max_model_len,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_scheduled_tokens=options.max_num_scheduled_tokens,
        max_num_seqs=options.max_num_seqs,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        target_itl_s=options.target_itl_s,
        batching=options.batching,
        batch_window_s=options.batch_window_s,
        scheduling_policy=options.scheduling_policy,
        priority_aging_s=options.priority_aging_s,
        tenant_weights=options.tenant_weights,
        max_num_queued_requests=options.max_num_queued_requests,
        max_num_queued_tokens=options.max_num_queued_tokens,
        queue_timeout_s=options.queue_timeout_s,
        block_size=_block_size(options),
        num_blocks=num_usable + 1,
        watermark=options.watermark,
        enable_prefix_caching=options.enable_prefix_caching,
        overlap=options.overlap,
        decode_steps=options.decode_steps,
        num_speculative_tokens=options.num_speculative_tokens,
        num_step_records=options.num_step_records,
        step_timeout_s=options.step_timeout_s,
    )
    return config, wanted if max_model_len < wanted else None


def build_engine(
    checkpoint: CheckpointSource,
    options: EngineOptions,
    *,
    memory_bytes: int,
    eos_token_ids: Collection[int] = (),
    weights_progress: Progress | None = None,
    compile_progress: Progress | None = None,
    programs_dir: Path | None = None,
    group: ProcessGroup | None = None,
) -> BuiltEngine:
    """Load the weights, compile every bucket, and return the engine, not started yet.

    Args:
        checkpoint: the model to serve.
        options: the operator's wishes.
        memory_bytes: memory of a device.
        eos_token_ids: ids that end an answer besides those that the configuration names.
        weights_progress: called with (tensors loaded, in all).
        compile_progress: called with (programs ready, in all).
        programs_dir: where compiled programs are kept for the next start, unless there is a group;
            None keeps none.
        group: the processes that serve together; None if this is the only one.

    Raises:
        ModelError: the model cannot be run as asked.
        ValueError: an option is out of range.
    """
    model = ModelConfig.from_hf(checkpoint.hf_config)
    all_eos = tuple(sorted({*model.eos_token_ids, *eos_token_ids}))
    model = replace(model, eos_token_ids=all_eos)
    devices = open_mesh(options.tensor_parallel_size)
    fault = fp8.find_fault(devices.devices[0]) if options.quantization == "fp8" else None
    if fault is not None:
        raise ModelError(f"quantization {fault}; int8 is for all devices")
    shard = shard_of(model, devices.num_devices)
    attention = _choose_attention(options, model)
    if group is not None:
        memory_bytes, programs_dir = group.least(memory_bytes), None
    is_sized = options.sizes_cache or free_bytes(devices.devices) is None
    config, clamped_from = plan_engine(
        options if is_sized else _with_one_request(options, model),
        shard,
        memory_bytes=memory_bytes if is_sized else sys.maxsize,
        kernel=attention.kernel,
    )
    packed = _can_pack(config, attention)
    scratch = 0
    if attention.library is not None:
        # How much it is depends on how large steps can be, so the cache is sized once more.
        scratch = scratch_bytes(shard, config, devices, packed=packed)
        room = memory_bytes - scratch
        if room <= 0:
            raise ModelError(
                f"steps take {scratch} of {memory_bytes} bytes of memory: a smaller "
                "max_num_batched_tokens makes them smaller"
            )
        config, clamped_from = plan_engine(
            options,
            shard,
            memory_bytes=room if group is None else group.least(room),
            kernel=attention.kernel,
        )
    if group is not None:
        group.check_agreement(repr((model, replace(config, tenant_weights={}))))
    with ThreadPoolExecutor(1) as beside:
        # The device fills its memory, while the host arranges weights.
        state = beside.submit(devices.new_state, shard, config) if is_sized else None
        # Nothing is rounded anew, so that answers stay what they are.
        keep_codes = options.keep_codes and attention.reads_codes and config.quantization is None
        decoder = _load(
            checkpoint, model, devices, config, packed, weights_progress, keep_codes=keep_codes
        )
    if not is_sized:
        free = free_bytes(devices.devices) or 0
        num_blocks = fitting_blocks(
            decoder,
            shard,
            config,
            devices,
            free=free if group is None else group.least(free),
            block_bytes=_block_bytes(options, shard, attention.kernel),
        )
        config, clamped_from = plan_engine(
            replace(options, num_kv_blocks=num_blocks - 1),
            shard,
            memory_bytes=memory_bytes,
            kernel=attention.kernel,
        )
    runner = JaxModelRunner(
        decoder,
        shard,
        config,
        devices=devices,
        state=None if state is None else state.result(),
        group=group,
        programs_dir=programs_dir,
        library=None if attention.library is None else native.load(attention.library),
    )
    runner.warm_up(progress=compile_progress)
    limits = EngineLimits(
        max_model_len=config.max_model_len,
        vocab_size=model.vocab_size,
        max_num_seqs=config.max_num_seqs,
        max_num_queued_requests=config.max_num_queued_requests,
        eos_token_ids=model.eos_token_ids,
    )
    core = EngineCore(
        config,
        runner,
        eos_token_ids=model.eos_token_ids,
        step_times=StepTimeModel(
            runner.buckets, runner.bucket_times_s, skips_padding=runner.skips_padding
        ),
    )
    codes = sum(
        parameter.nbytes
        for path, parameter in nnx.to_flat_state(nnx.state(decoder))
        if path[-1] == "codes"
    )
    return BuiltEngine(
        engine=AsyncEngine(core, limits),
        model=model,
        shard=shard,
        config=config,
        clamped_from=clamped_from,
        num_buckets=len(runner.buckets),
        memory=MemoryUse(
            weights=(_weight_bytes(decoder) - codes) // devices.num_devices,
            codes=codes,
            kv_cache=config.num_blocks * _block_bytes(options, shard, attention.kernel),
            workspace=runner.workspace_bytes,
            scratch=scratch,
            available=memory_bytes,
        ),
        attention=attention,
        devices=devices,
        runner=runner,
    )


def _load(
    checkpoint: CheckpointSource,
    model: ModelConfig,
    devices: DeviceMesh,
    config: EngineConfig,
    packed: bool,
    progress: Progress | None,
    *,
    keep_codes: bool,
) -> Decoder:
    """Load the model, or a shard of it on each device."""
    sharding = devices.weights_sharding
    codes = checkpoint if keep_codes and packed else None
    load = (
        partial(load_decoder, codes=codes)
        if sharding is None
        else partial(load_shards, sharding=sharding)
    )
    return load(
        model,
        checkpoint,
        dtype=config.dtype,
        packed=packed,
        quantization=config.quantization,
        progress=progress,
    )


def _with_one_request(options: EngineOptions, model: ModelConfig) -> EngineOptions:
    """Return the options for a cache of one request of the full length."""
    max_model_len = options.max_model_len or model.max_position_embeddings
    return replace(options, num_kv_blocks=-(-max_model_len // _block_size(options)))


def _block_size(options: EngineOptions) -> int:
    if options.block_size is None:
        return default_block_size(jax.default_backend())
    return options.block_size


def _choose_attention(options: EngineOptions, model: ModelConfig) -> KernelChoice:
    """Choose the kernel of the attention, and make it known to XLA."""
    platform = jax.default_backend()
    gpu = GpuUse(
        device=jax.devices()[0].device_kind,
        kv_cache_dtype=resolve_kv_cache_dtype(options.kv_cache_dtype, options.dtype),
        head_dim=model.head_dim,
        is_plain=model.sliding_window is None and model.attention_soft_cap is None,
    )
    choice = choose_kernel(
        options.attention_kernel,
        platform=platform,
        block_size=_block_size(options),
        folder=kernels_dir(cache_dir()),
        gpu=gpu if platform == "gpu" else None,
    )
    if choice.library is not None:
        native.load(choice.library)
    return choice


def _can_pack(config: EngineConfig, attention: KernelChoice) -> bool:
    """Whether there are products for packed weights; those of eight bits need no instructions."""
    if config.quantization is not None:
        return attention.library is not None
    return attention.can_project and config.dtype == "bfloat16"


def _block_bytes(options: EngineOptions, model: ModelConfig, kernel: AttentionKernel) -> int:
    dtype = resolve_kv_cache_dtype(options.kv_cache_dtype, options.dtype)
    return kv_block_bytes(model, block_size=_block_size(options), dtype=dtype, kernel=kernel)


def _cache_bytes(options: EngineOptions, memory_bytes: int) -> int:
    if options.kv_cache_memory_bytes is not None:
        return options.kv_cache_memory_bytes
    if options.kv_cache_memory_share is not None:
        return int(options.kv_cache_memory_share * memory_bytes)
    return min(DEFAULT_KV_CACHE_BYTES, memory_bytes // 4)


def _weight_bytes(decoder: Decoder) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(decoder)))
