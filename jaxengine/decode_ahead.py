"""Several decode-only steps at once, so that the device need not wait for the host between them.

What a decode-only step does is known before the tokens of the steps before it are, but for these
tokens themselves, and the device feeds those back. So the scheduler is asked for one step after
the other, as ever, and the device runs them one after the other, as one program. Every sequence
gets the tokens that it would have got; those beyond its end are dropped, as the one surplus token
of a single step in flight is.
"""

from collections.abc import Iterable, Iterator

from jaxengine.request import Request, RequestStatus
from jaxengine.scheduler import Scheduler
from jaxengine.scheduler_output import SchedulerOutput

__all__ = ["schedule_ahead"]


def schedule_ahead(
    scheduler: Scheduler, now_s: float, *, in_flight: Iterable[SchedulerOutput], most: int
) -> Iterator[SchedulerOutput]:
    """Schedule a step, and further ones if they are sure to be nothing but decodes.

    A step's block tables must be read before the next one is asked for.

    Args:
        scheduler: decides on each.
        now_s: when.
        in_flight: the steps whose tokens are not known yet.
        most: steps to schedule.
    """
    known = list(in_flight) if most > 1 else []
    output = scheduler.schedule(now_s)
    yield output
    for _ in range(most - 1):
        # Whoever waits, also for what a preemption took, need not wait longer than for a step.
        if scheduler.num_waiting or not _may_go_on(output, known, scheduler.num_running):
            return
        known.append(output)
        output = scheduler.schedule(now_s)
        if output.is_empty:
            return
        yield output


def _may_go_on(
    output: SchedulerOutput, in_flight: Iterable[SchedulerOutput], num_running: int
) -> bool:
    """Whether the step decodes all that runs, and none of it needs to be seen before the next."""
    if output.wasted_slots or not all(
        item.num_new_tokens == 1 and item.samples and _can_run_ahead(item.request)
        for item in output.scheduled
    ):
        return False
    # Those whose last token is on its way need no step any more.
    ending = {
        item.request for step in in_flight for item in step.scheduled if _is_ending(item.request)
    }
    running = {item.request for item in output.scheduled}
    return len(running | ending) == num_running


def _can_run_ahead(request: Request) -> bool:
    """Whether nothing is wanted of its tokens but the tokens, and no rule decides on them."""
    return (
        request.rules is None
        and request.params.logprobs is None
        and not request.lacks_prompt_logprobs
    )


def _is_ending(request: Request) -> bool:
    return request.status is RequestStatus.RUNNING and request.num_tokens >= request.max_num_tokens
