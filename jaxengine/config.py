"""Settings of the engine."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from kernels_pallas.kernel_names import AttentionKernel

__all__ = [
    "BatchingMode",
    "Dtype",
    "EngineConfig",
    "KVCacheDtype",
    "Quantization",
    "SchedulingPolicy",
]

# The native kernel attends to the queries of a few tokens at once in about the time of one.
NATIVE_LEAST_CHUNK = 4

Dtype = Literal["bfloat16", "float32"]
Quantization = Literal["int8", "fp8"]
KVCacheDtype = Literal["auto", "bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2", "int8"]
BatchingMode = Literal["continuous", "dynamic", "static"]
SchedulingPolicy = Literal["fair", "priority", "fcfs"]

AT_LEAST_ONE = (
    *("max_model_len", "max_num_batched_tokens", "max_num_seqs", "num_blocks"),
    *("max_num_queued_tokens", "num_step_records", "decode_steps"),
)
NOT_NEGATIVE = (
    *("max_num_queued_requests", "long_prefill_token_threshold", "num_speculative_tokens"),
)
POSITIVE = (
    *("target_itl_s", "batch_window_s", "priority_aging_s", "queue_timeout_s"),
    "step_timeout_s",
)
CHOICES = {
    "quantization": get_args(Quantization),
    "kv_cache_dtype": get_args(KVCacheDtype),
    "attention_kernel": get_args(AttentionKernel),
    "batching": get_args(BatchingMode),
    "scheduling_policy": get_args(SchedulingPolicy),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Budgets and switches of one engine. Names as in vLLM where the meaning is the same.

    Attributes:
        dtype: of weights and activations.
        quantization: what the matrices of products are stored and multiplied in instead.
        kv_cache_dtype: of the KV cache; "auto" takes `dtype`.
        attention_kernel: the implementation of the attention.
        max_model_len: most tokens of a request, prompt and output together.
        max_num_batched_tokens: most tokens that a step can hold (the largest bucket).
        max_num_scheduled_tokens: most tokens that the scheduler puts into a step; None means all
            that it can hold.
        max_num_seqs: most requests that run at the same time.
        long_prefill_token_threshold: most prompt tokens of one request in a step while there are
            others; 0 sets no bound.
        target_itl_s: prompts are cut so that steps with running streams take no longer than this,
            by the cost model's prediction; None sets no bound.
        batching: "continuous" decides anew before every step. "dynamic" and "static" are the
            baselines: a batch starts together, and its rows are computed and keep their blocks
            until all of it has ended.
        batch_window_s: how long a dynamic batch waits to fill, from the arrival of its first.
        scheduling_policy: who goes first. "fair": tenants share by weight, priority inside each;
            "priority": by priority for all; "fcfs": in order of arrival.
        priority_aging_s: waiting for so long is worth one step of priority, so nothing starves.
        tenant_weights: share of each tenant named; all others have 1.
        max_num_queued_requests: most requests that wait; beyond, new ones are refused.
        max_num_queued_tokens: most prompt tokens that wait, likewise; None sets no bound.
        queue_timeout_s: a request that has not started after so long ends, unless it says
            otherwise; None lets it wait.
        block_size: tokens per KV block; a power of two from 8 to 128.
        num_blocks: KV blocks, the reserved block 0 included.
        watermark: blocks that admission leaves free for running requests to grow: a share of all
            blocks if below 1, else a number of blocks.
        enable_prefix_caching: reuse the blocks of shared prompt beginnings.
        overlap: launch a step before the tokens of the one before are known on the host.
        decode_steps: steps of nothing but decodes that the device runs at once, if nobody waits
            and no rule needs to see a token first; more hides more of the host's work, and tokens
            come in groups.
        num_speculative_tokens: most tokens of a request that a step computes along because its own
            text suggests them; 0 guesses nothing.
        token_buckets: compiled sizes of a mixed step, ascending to max_num_batched_tokens; empty
            leaves the choice to the model runner.
        num_step_records: steps that are kept for those who watch.
        step_timeout_s: an engine with work whose steps take longer counts as stalled; None never.
    """

    dtype: Dtype = "bfloat16"
    quantization: Quantization | None = None
    kv_cache_dtype: KVCacheDtype = "auto"
    attention_kernel: AttentionKernel = "reference"
    max_model_len: int = 2048
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
    max_num_queued_tokens: int | None = None
    queue_timeout_s: float | None = None
    block_size: int = 16
    num_blocks: int = 1024
    watermark: float = 0.01
    enable_prefix_caching: bool = True
    overlap: bool = True
    decode_steps: int = 1
    num_speculative_tokens: int = 0
    token_buckets: tuple[int, ...] = ()
    num_step_records: int = 1024
    step_timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name in (*AT_LEAST_ONE, *NOT_NEGATIVE):
            least = 0 if name in NOT_NEGATIVE else 1
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive, got {value}")
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value}")
        for tenant, weight in self.tenant_weights.items():
            if not 0 < weight < math.inf:
                raise ValueError(f"the weight of tenant {tenant!r} must be positive, got {weight}")
        if self.block_size not in (8, 16, 32, 64, 128):
            raise ValueError(f"block_size must be 8, 16, 32, 64 or 128, got {self.block_size}")
        if not 0 <= self.watermark < math.inf:
            raise ValueError(f"watermark must not be negative, got {self.watermark}")
        if 1 <= self.watermark >= self.num_blocks - 1:
            raise ValueError(
                f"watermark ({self.watermark}) leaves none of {self.num_blocks - 1} blocks"
            )
        if self.num_blocks < 2:
            raise ValueError("num_blocks must be at least 2: block 0 is reserved")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs ({self.max_num_seqs}) must not exceed "
                f"max_num_batched_tokens ({self.max_num_batched_tokens})"
            )
        if self.max_model_len > self.kv_capacity_tokens:
            raise ValueError(
                f"max_model_len ({self.max_model_len}) exceeds the KV capacity "
                f"({self.kv_capacity_tokens} tokens)"
            )
        scheduled = self.max_num_scheduled_tokens
        if scheduled is not None and not 1 <= scheduled <= self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_scheduled_tokens must be in [1, {self.max_num_batched_tokens}], "
                f"got {scheduled}"
            )
        if self.num_speculative_tokens and self.decode_steps > 1:
            raise ValueError("num_speculative_tokens and decode_steps exclude each other")
        if self.num_speculative_tokens and self.batching != "continuous":
            raise ValueError(
                f"num_speculative_tokens needs continuous batching, not {self.batching}"
            )
        buckets = self.token_buckets
        if buckets and (
            list(buckets) != sorted(set(buckets))
            or buckets[0] < 1
            or buckets[-1] != self.max_num_batched_tokens
        ):
            raise ValueError(
                f"token_buckets must ascend from at least 1 and end at max_num_batched_tokens "
                f"({self.max_num_batched_tokens}), got {buckets}"
            )

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens that the KV cache can hold."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def max_blocks_per_seq(self) -> int:
        """M: width of the block tables."""
        return math.ceil(self.max_model_len / self.block_size)

    @property
    def least_chunk(self) -> int:
        """Prompt tokens that a step takes even where it has no time for them.

        Fewer would take as long: a chunk reads its whole context, however short it is.
        """
        return NATIVE_LEAST_CHUNK if self.attention_kernel == "native" else self.block_size

    @property
    def watermark_blocks(self) -> int:
        if self.watermark < 1:
            return math.ceil(self.watermark * (self.num_blocks - 1))
        return math.ceil(self.watermark)

    @property
    def scheduled_tokens_limit(self) -> int:
        return self.max_num_scheduled_tokens or self.max_num_batched_tokens
