"""Notices that the engine gets no further although it has work, and tells where it stands."""

import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import PurePath

from jaxengine.scheduler_output import SchedulerOutput

__all__ = ["StallWatch", "describe_steps", "describe_thread"]

# Ticks without progress that make a stall. Counted, because looks at a clock would take a process
# that was stopped or swapped out, for a device that hangs: it misses ticks, too.
TICKS = 10

# Of what a log line names.
MAX_REQUESTS_NAMED = 8
MAX_FRAMES = 8


class StallWatch:
    """Counts ticks that pass while there is work and no step ends.

    Attributes:
        tick_interval_s: how often `tick` wants to be called.
        is_stalled: no step has ended for `timeout_s`, and none has since.
        num_stalls: how often that came to be so.
    """

    def __init__(self, timeout_s: float) -> None:
        self.tick_interval_s = timeout_s / TICKS
        self.is_stalled = False
        self.num_stalls = 0
        self._num_silent = 0

    def note_progress(self) -> None:
        """A step has ended, or there is nothing to do."""
        self._num_silent = 0
        self.is_stalled = False

    def tick(self) -> bool:
        """Count an interval with work to do; return whether this one began a stall."""
        self._num_silent += 1
        # The work may have come just before the first of them.
        begins = self._num_silent > TICKS and not self.is_stalled
        if begins:
            self.is_stalled = True
            self.num_stalls += 1
        return begins


def describe_steps(steps: Iterable[SchedulerOutput]) -> str:
    """Return what steps hold, for a log line: numbers and request ids."""
    return "; ".join(_describe_step(step) for step in steps) or "none"


def _describe_step(step: SchedulerOutput) -> str:
    names = [item.request.request_id for item in step.scheduled[:MAX_REQUESTS_NAMED]]
    if len(step.scheduled) > MAX_REQUESTS_NAMED:
        names.append("...")
    return f"{step.num_tokens} tokens of {len(step.scheduled)} requests ({', '.join(names)})"


def describe_thread(thread: threading.Thread) -> str:
    """Return where a thread is, innermost function first, for a log line."""
    frame = None if thread.ident is None else sys._current_frames().get(thread.ident)
    if frame is None:
        return "nowhere"
    stack = traceback.extract_stack(frame)[: -MAX_FRAMES - 1 : -1]
    return " < ".join(
        f"{call.name} ({PurePath(call.filename).name}:{call.lineno})" for call in stack
    )
