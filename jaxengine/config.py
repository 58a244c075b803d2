"""Settings of the engine."""

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["Dtype", "EngineConfig"]

Dtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Budgets and switches of one engine. Names as in vLLM where the meaning is the same.

    Attributes:
        dtype: of weights, activations and KV cache.
        max_model_len: most tokens of a request, prompt and output together.
        max_num_batched_tokens: most tokens that a step can hold (the largest bucket).
        max_num_scheduled_tokens: most tokens that the scheduler puts into a step; None means all
            that it can hold.
        max_num_seqs: most requests that run at the same time.
        max_num_queued_requests: most requests that wait; beyond, new ones are refused.
        block_size: tokens per KV block; a power of two from 8 to 128.
        num_blocks: KV blocks, the reserved block 0 included.
        watermark: share of the blocks that admission leaves free for running requests to grow.
        enable_prefix_caching: reuse the blocks of shared prompt beginnings.
        overlap: launch a step before the tokens of the one before are known on the host.
        token_buckets: compiled sizes of a mixed step, ascending to max_num_batched_tokens; empty
            leaves the choice to the model runner.
    """

    dtype: Dtype = "bfloat16"
    max_model_len: int = 2048
    max_num_batched_tokens: int = 512
    max_num_scheduled_tokens: int | None = None
    max_num_seqs: int = 64
    max_num_queued_requests: int = 1024
    block_size: int = 16
    num_blocks: int = 1024
    watermark: float = 0.01
    enable_prefix_caching: bool = True
    overlap: bool = True
    token_buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "num_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_queued_requests < 0:
            raise ValueError(
                f"max_num_queued_requests must not be negative, got {self.max_num_queued_requests}"
            )
        if self.block_size not in (8, 16, 32, 64, 128):
            raise ValueError(f"block_size must be 8, 16, 32, 64 or 128, got {self.block_size}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be in [0, 1), got {self.watermark}")
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
    def watermark_blocks(self) -> int:
        return math.ceil(self.watermark * (self.num_blocks - 1))

    @property
    def scheduled_tokens_limit(self) -> int:
        return self.max_num_scheduled_tokens or self.max_num_batched_tokens
