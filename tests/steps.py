"""Steps made by hand, as a scheduler would decide them."""

from jaxengine.scheduler_output import ScheduledRequest, SchedulerOutput
from jaxengine.step_time import StepWork

__all__ = ["step_of"]


def step_of(*items: ScheduledRequest, **fields) -> SchedulerOutput:
    """Return a step of these shares. Its work names their tokens, not what they attend to."""
    num_tokens = sum(item.num_new_tokens for item in items)
    work = StepWork(
        num_tokens=num_tokens,
        num_seqs=len(items),
        decode_only=all(item.num_new_tokens == 1 for item in items),
        decode_context=0,
        prefill_context=0,
        num_sampled=0,
        chunk_context=0,
    )
    return SchedulerOutput(
        scheduled=items, **({"num_tokens": num_tokens, "num_preempted": 0, "work": work} | fields)
    )
