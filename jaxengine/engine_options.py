"""What an operator asks of an engine, before anything is known of the model or the machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxengine.config import BatchingMode, Dtype, KVCacheDtype, Quantization, SchedulingPolicy
from kernels_pallas.kernel_names import WantedKernel

__all__ = ["EngineOptions"]

# Options that say how large the KV cache is.
CACHE_SIZES = ("kv_cache_memory_bytes", "kv_cache_memory_share", "num_kv_blocks")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """What an operator asks for; None leaves the choice to us. Names as in EngineConfig.

    Attributes:
        keep_codes: keep weights that are stored in few bits as they are, beside the wide ones,
            where there are products that read them.
        tensor_parallel_size: devices that share the model.
        kv_cache_memory_bytes: size of the KV cache, on each device.
        kv_cache_memory_share: the same as a share of the memory.
        num_kv_blocks: the same as the number of blocks that requests can use. At most one of the
            three is given. With none, a device with memory of its own is filled.
    """

    dtype: Dtype = "bfloat16"
    quantization: Quantization | None = None
    kv_cache_dtype: KVCacheDtype = "auto"
    attention_kernel: WantedKernel = "auto"
    keep_codes: bool = True
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    max_num_scheduled_tokens: int | None = None
    max_num_seqs: int = 64
    long_prefill_token_threshold: int = 0
    target_itl_s: float | None = None
    batching: BatchingMode = "continuous"
    batch_window_s: float = 0.05
    scheduling_policy: SchedulingPolicy = "fair"
    priority_aging_s: float = 10.0
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    max_num_queued_requests: int = 1024
    max_num_queued_tokens: int | None = 1 << 20
    queue_timeout_s: float | None = 300.0
    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_memory_share: float | None = None
    num_kv_blocks: int | None = None
    watermark: float = 0.01
    enable_prefix_caching: bool = True
    overlap: bool = True
    decode_steps: int = 1
    num_speculative_tokens: int = 0
    num_step_records: int = 1024
    step_timeout_s: float | None = 300.0

    @property
    def sizes_cache(self) -> bool:
        """Whether the operator says how large the KV cache is."""
        return any(getattr(self, name) is not None for name in CACHE_SIZES)

    def __post_init__(self) -> None:
        given = [name for name in CACHE_SIZES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give only one of {' and '.join(given)}")
        share = self.kv_cache_memory_share
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"kv_cache_memory_share must be above 0 and at most 1, got {share}")
