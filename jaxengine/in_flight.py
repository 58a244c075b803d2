"""The steps that the device was given and whose tokens have not been taken in."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from jaxengine.device_interface import StepHandle
from jaxengine.scheduler_output import SchedulerOutput
from jaxengine.step_meter import LaunchedStep

__all__ = ["InFlight", "StepInFlight"]

# While a step runs and the next is launched, whoever comes may still overtake both. So a step that
# takes long is not waited for, but looked at from time to time, the nearer its end the sooner.
WORTH_LOOKING_S = 0.005
SOONEST_LOOK_S = 0.00025
LATEST_LOOK_S = 0.002


@dataclass(slots=True)
class StepInFlight:
    """A scheduled step; `handle` and `launched` are None until it is launched.

    Attributes:
        num_together: steps that end with this one, itself included, of those not taken in yet.
        left_s: seconds that it should take from now on, or from when the device gets to it; None if
            that is not known.
        began_s: when the device began it, if others have overtaken it since.
        overtaken_s: how long these took.
    """

    output: SchedulerOutput
    handle: StepHandle | None = None
    launched: LaunchedStep | None = None
    num_together: int = 1
    left_s: float | None = None
    began_s: float | None = None
    overtaken_s: float = 0.0

    def may_be_overtaken(self) -> bool:
        """Whether newcomers may run before its rest, so that it gets on however many there are.

        They delay it for as long as it takes itself, or once if that is not known. A long piece
        they join when it is paused.
        """
        if self.output.pause_after_s is not None:
            return False
        predicted_s = None if self.launched is None else self.launched.predicted_s
        return self.began_s is None or (predicted_s is not None and self.overtaken_s < predicted_s)

    def is_done(self) -> bool:
        return self.handle is not None and self.handle.is_done()


class InFlight:
    """These steps, the one that ends first at first, and how long the device is busy with them.

    Attributes:
        busy_since_s: since when it is with what runs now.
        busy_s: with all that it was given before.
        streams_ran_s: when it had last run a step that is no long piece of a prompt.
    """

    def __init__(self) -> None:
        self._steps: deque[StepInFlight] = deque()
        self.busy_since_s = 0.0
        self.busy_s = 0.0
        self.streams_ran_s = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int) -> StepInFlight:
        return self._steps[index]

    def __iter__(self) -> Iterator[StepInFlight]:
        return iter(self._steps)

    @property
    def outputs(self) -> tuple[SchedulerOutput, ...]:
        """What was scheduled. Any thread may ask."""
        return tuple(step.output for step in list(self._steps))

    def append(self, output: SchedulerOutput) -> None:
        """Count a step as in flight, behind the others."""
        self._steps.append(StepInFlight(output))

    def put_first(self, output: SchedulerOutput) -> StepInFlight:
        """Count a step as in flight, before the others, and return it."""
        self._steps.appendleft(StepInFlight(output))
        return self._steps[0]

    def drop_first(self) -> None:
        """Forget the first step, which has ended at `busy_since_s`."""
        if self._steps.popleft().output.pause_after_s is None:
            self.streams_ran_s = self.busy_since_s

    def clear(self) -> None:
        self._steps.clear()

    def left_s(self) -> float | None:
        """Return what all together should take since `busy_since_s`; None if that is not known."""
        left_s = 0.0
        for step in self._steps:
            if step.left_s is None:
                return None
            left_s += step.left_s
        return left_s

    def pauses_at_s(self) -> float | None:
        """Return when streams should run before the rest of the only step, if they should."""
        if len(self._steps) != 1:
            return None
        step = self._steps[0]
        after_s = step.output.pause_after_s
        if after_s is None or step.left_s is None:
            return None
        pauses_at_s = self.streams_ran_s + after_s
        return pauses_at_s if pauses_at_s < self.busy_since_s + step.left_s else None

    def is_worth_looking(self) -> bool:
        """Whether one should look when the first step is done, rather than wait for it."""
        left_s = self._steps[0].left_s
        return left_s is not None and left_s >= WORTH_LOOKING_S and not self._steps[0].is_done()

    def seconds_to_look(self, now_s: float) -> float:
        """Return in how many seconds to look next."""
        left_s = self._steps[0].left_s or 0.0
        return min(max((self.busy_since_s + left_s - now_s) / 2, SOONEST_LOOK_S), LATEST_LOOK_S)

    def count_busy(self, now_s: float) -> None:
        """Count the time until now; what is in flight from now on is yet to be counted."""
        self.busy_s += now_s - self.busy_since_s
        self.busy_since_s = now_s
