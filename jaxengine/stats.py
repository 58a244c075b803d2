"""Counters and gauges of a running engine, as plain numbers."""

from dataclasses import dataclass, field

__all__ = ["ITERATION_TOKEN_BUCKETS", "EngineStats"]

# Upper bounds of the histogram of scheduled tokens per step.
ITERATION_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """A consistent snapshot taken after a step. Counters only ever grow.

    Attributes:
        num_running, num_waiting: requests now.
        num_blocks: KV blocks that requests can use (the reserved block 0 not counted).
        num_free_blocks: blocks that hold nothing, or only cached prefixes nobody uses.
        num_cached_blocks: among the free ones, those that hold a cached prefix.
        block_size: tokens per block.
        prefix_queries, prefix_hits: prompt tokens looked up in, and found in, the prefix cache.
        prompt_tokens, generation_tokens: tokens of prompts computed or cached, tokens sampled.
        num_preemptions: requests that lost their blocks.
        num_steps: passes of the engine.
        step_busy_s: time during which at least one step was in flight.
        iteration_tokens: count of steps per bucket of ITERATION_TOKEN_BUCKETS, last one = beyond.
        iteration_tokens_sum: scheduled tokens over all steps.
        padded_tokens: tokens computed only to fill buckets.
        compiles_after_ready: programs compiled after start-up; 0 in a healthy engine.
        num_step_failures: steps that raised.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    block_size: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    step_busy_s: float = 0.0
    iteration_tokens: tuple[int, ...] = field(default=(0,) * (len(ITERATION_TOKEN_BUCKETS) + 1))
    iteration_tokens_sum: int = 0
    padded_tokens: int = 0
    compiles_after_ready: int = 0
    num_step_failures: int = 0

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0
