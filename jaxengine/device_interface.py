"""What the engine core needs from a device: steps are launched, and their tokens come back."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from jaxengine.outputs import ItemLogprobs
from jaxengine.scheduler_output import SchedulerOutput

__all__ = ["ModelRunner", "StepHandle"]


class StepHandle(Protocol):
    """A step in flight."""

    @property
    def num_slots(self) -> int:
        """Token slots that the device computes: the tokens of the step, and what fills up."""
        ...

    def is_done(self) -> bool:
        """Whether `result` would not have to wait."""
        ...

    def result(self) -> Sequence[int]:
        """Wait for the step; return one token per scheduled request.

        It is meaningless where nothing was sampled.
        """
        ...

    def logprobs(self) -> Mapping[int, ItemLogprobs]:
        """Return those of the scheduled requests, by index, that want them; after `result`."""
        ...


class ModelRunner(Protocol):
    """What the engine core needs from the device. Implemented by JaxModelRunner and by fakes."""

    def execute(self, outputs: Iterable[SchedulerOutput]) -> Sequence[StepHandle]:
        """Launch one step, or several one after the other, without waiting for them.

        `decode_steps` of them are one piece of work for the device.

        Args:
            outputs: each must be read before the next is asked for. All but the first are
                decode-only, and hold no request that the first does not.
        """
        ...

    @property
    def can_overtake(self) -> bool:
        """Whether there is `overtake`."""
        ...

    def overtake(
        self, running: Sequence[StepHandle], output: SchedulerOutput
    ) -> tuple[StepHandle, Sequence[StepHandle]]:
        """Launch a step to be run before the rest of others, as soon as these can be paused.

        Args:
            running: the others, one or two: all that are in flight.
            output: the step; it neither reads nor writes what they write.

        Returns:
            The step, and what takes the places of the others. Their tokens are what they would be.
        """
        ...

    def reset(self) -> None:
        """Start from an empty cache after a failed step."""
        ...

    @property
    def compiles_after_ready(self) -> int: ...
