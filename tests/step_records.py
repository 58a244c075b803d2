"""Records of steps as an engine would write them, with times that can be computed by hand."""

from typing import Any

from jaxengine.step_log import StepRecord, StepShare

__all__ = ["make_step", "make_steps"]

# On the clock of these records step i is scheduled from 1000 + i * STEP_S on.
FIRST_S = 1000.0
STEP_S = 0.02


def make_step(index: int, **fields: Any) -> StepRecord:
    """Return a step in which request "a" decodes and "b" computes 6 tokens of its prompt.

    Launched 2 ms after scheduling began, on the device from 3 ms to 19 ms, predicted as 15 ms;
    8 slots, 1 of them wasted; of 100 blocks 30 are used, 20 cached and 50 free.
    """
    scheduled_s = FIRST_S + index * STEP_S
    values: dict[str, Any] = {
        "index": index,
        "scheduled_s": scheduled_s,
        "launched_s": scheduled_s + 0.002,
        "device_start_s": scheduled_s + 0.003,
        "end_s": scheduled_s + 0.019,
        "predicted_s": 0.015,
        "num_decodes": 1,
        "num_prefills": 1,
        "decode_tokens": 1,
        "prefill_tokens": 6,
        "draft_tokens": 0,
        "accepted_draft_tokens": 0,
        "num_slots": 8,
        "wasted_slots": 1,
        "num_preempted": 0,
        "num_running": 2,
        "num_waiting": 3,
        "waiting_for": "seqs",
        "num_used_blocks": 30,
        "num_cached_blocks": 20,
        "num_free_blocks": 50,
        "shares": (
            StepShare(request_id="a", first_position=40 + index, num_tokens=1, samples=True),
            StepShare(request_id="b", first_position=6 * index, num_tokens=6, samples=False),
        ),
        **fields,
    }
    return StepRecord(**values)


def make_steps(start: int, stop: int, **fields: Any) -> list[StepRecord]:
    return [make_step(index, **fields) for index in range(start, stop)]
