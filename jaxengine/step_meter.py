"""Counts what steps did, and writes the record of each."""

from bisect import bisect_left
from dataclasses import dataclass

from jaxengine.scheduler_output import SchedulerOutput
from jaxengine.stats import ITERATION_TOKEN_BUCKETS, STEP_TIME_BUCKETS
from jaxengine.step_log import StepRecord, StepShare

__all__ = ["LaunchedStep", "StepMeter"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchedStep:
    """A step that the device was given, and the state of the engine at that moment.

    Attributes: as in StepRecord.
    """

    output: SchedulerOutput
    scheduled_s: float
    launched_s: float
    predicted_s: float | None
    num_slots: int
    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int


class StepMeter:
    """Counters over all finished steps; they only ever grow.

    Attributes: as in EngineStats.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.iteration_tokens = [0] * (len(ITERATION_TOKEN_BUCKETS) + 1)
        self.iteration_tokens_sum = 0
        self.step_times = [0] * (len(STEP_TIME_BUCKETS) + 1)
        self.step_time_sum_s = 0.0
        self.num_predicted_steps = 0
        self.step_prediction_error_s = 0.0
        self.padded_tokens = 0
        self.wasted_prompt_slots = 0
        self.wasted_row_slots = 0
        self.device_idle_s = 0.0
        self._last_end_s = 0.0

    def device_start_s(self, step: LaunchedStep) -> float:
        """Return when the device could begin a step that finishes now: steps run in order."""
        return max(step.launched_s, self._last_end_s)

    def finish(
        self,
        step: LaunchedStep,
        end_s: float,
        *,
        num_accepted: int = 0,
        began_s: float | None = None,
        overtaken_s: float = 0.0,
    ) -> StepRecord:
        """Count a step whose tokens are here, and return its record.

        Args:
            step: as it was launched.
            end_s: when its tokens reached the host.
            num_accepted: of its drafts.
            began_s: when the device began it, if others have overtaken it since.
            overtaken_s: how long these took.
        """
        output = step.output
        device_start_s = self.device_start_s(step) if began_s is None else began_s
        duration_s = end_s - device_start_s - overtaken_s
        padded = step.num_slots - output.num_tokens - output.wasted_slots
        self.iteration_tokens[bisect_left(ITERATION_TOKEN_BUCKETS, output.num_tokens)] += 1
        self.iteration_tokens_sum += output.num_tokens
        self.step_times[bisect_left(STEP_TIME_BUCKETS, duration_s)] += 1
        self.step_time_sum_s += duration_s
        if step.predicted_s is not None:
            self.num_predicted_steps += 1
            self.step_prediction_error_s += abs(step.predicted_s - duration_s)
        self.padded_tokens += padded
        self.wasted_prompt_slots += output.padding_slots
        self.wasted_row_slots += len(output.ended_rows)
        self._last_end_s = end_s
        shares = tuple(
            StepShare(
                item.request.request_id, item.first_position, item.num_new_tokens, item.samples
            )
            for item in output.scheduled
            if not item.is_draft
        )
        num_decodes = sum(share.num_tokens == 1 for share in shares)
        num_drafts = len(output.scheduled) - len(shares)
        record = StepRecord(
            index=self.num_steps,
            scheduled_s=step.scheduled_s,
            launched_s=step.launched_s,
            device_start_s=device_start_s,
            end_s=end_s,
            overtaken_s=overtaken_s,
            predicted_s=step.predicted_s,
            num_decodes=num_decodes,
            num_prefills=len(shares) - num_decodes,
            decode_tokens=num_decodes,
            prefill_tokens=output.num_tokens - num_decodes - num_drafts,
            draft_tokens=num_drafts,
            accepted_draft_tokens=num_accepted,
            num_slots=step.num_slots,
            wasted_slots=step.num_slots - output.num_tokens,
            num_preempted=output.num_preempted,
            num_running=step.num_running,
            num_waiting=step.num_waiting,
            waiting_for=output.waiting_for,
            num_used_blocks=step.num_used_blocks,
            num_cached_blocks=step.num_cached_blocks,
            num_free_blocks=step.num_free_blocks,
            shares=shares,
        )
        self.num_steps += 1
        return record
