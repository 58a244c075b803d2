"""Counters and gauges of a running engine, as plain numbers."""

from dataclasses import dataclass, field

__all__ = ["ITERATION_TOKEN_BUCKETS", "STEP_TIME_BUCKETS", "EngineStats"]

# Upper bounds of the histogram of scheduled tokens per step.
ITERATION_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

# Upper bounds, in seconds, of the histogram of step times.
STEP_TIME_BUCKETS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """A consistent snapshot taken after a step. Counters only ever grow.

    Attributes:
        num_running, num_waiting: requests now.
        num_preempted: among the waiting, those that ran before and made room for others.
        num_waiting_tokens: tokens that the waiting ones still have to compute.
        waiting_for: what the first waiting request waits for, as in StepRecord.
        num_received, tokens_received: requests ever taken over, and the tokens of their prompts.
        num_admitted, tokens_admitted: among them, those that have started to run.
        num_blocks: KV blocks that requests can use (the reserved block 0 not counted).
        num_free_blocks: blocks that hold nothing, or only cached prefixes nobody uses.
        num_cached_blocks: among the free ones, those that hold a cached prefix.
        block_size: tokens per block.
        prefix_queries, prefix_hits: prompt tokens looked up in, and found in, the prefix cache.
        prompt_tokens, generation_tokens: tokens of prompts computed or cached, tokens sampled.
        draft_tokens, accepted_draft_tokens: guessed tokens that steps computed along, and those
            among them that were right.
        num_preemptions: times a request made room for another, as in RequestTiming.
        num_steps: passes of the engine.
        num_steps_overtaken: times that some were run before the rest of others.
        step_times: count of steps per bucket of STEP_TIME_BUCKETS, last one = beyond.
        step_time_sum_s: time on the device over all steps.
        num_predicted_steps: steps whose time was predicted.
        step_prediction_error_s: sum of the absolute errors of those predictions.
        step_busy_s: time during which at least one step was in flight.
        device_idle_s: time without a step on the device while there were requests. A step that is
            done before the next one is launched counts as done when it should have been.
        iteration_tokens: count of steps per bucket of ITERATION_TOKEN_BUCKETS, last one = beyond.
        iteration_tokens_sum: scheduled tokens over all steps.
        padded_tokens: token slots computed only to fill buckets.
        wasted_prompt_slots: slots that padded prompts to the longest of a static batch.
        wasted_row_slots: slots of requests that had ended while their batch went on.
        compiles_after_ready: programs compiled after start-up; 0 in a healthy engine.
        num_step_failures: steps that raised.
        num_stalls: times that no step ended for too long.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_preempted: int = 0
    num_waiting_tokens: int = 0
    waiting_for: str = ""
    num_received: int = 0
    tokens_received: int = 0
    num_admitted: int = 0
    tokens_admitted: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    block_size: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_steps_overtaken: int = 0
    step_times: tuple[int, ...] = field(default=(0,) * (len(STEP_TIME_BUCKETS) + 1))
    step_time_sum_s: float = 0.0
    num_predicted_steps: int = 0
    step_prediction_error_s: float = 0.0
    step_busy_s: float = 0.0
    device_idle_s: float = 0.0
    iteration_tokens: tuple[int, ...] = field(default=(0,) * (len(ITERATION_TOKEN_BUCKETS) + 1))
    iteration_tokens_sum: int = 0
    padded_tokens: int = 0
    wasted_prompt_slots: int = 0
    wasted_row_slots: int = 0
    compiles_after_ready: int = 0
    num_step_failures: int = 0
    num_stalls: int = 0

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0
