"""Steps that JAX has been given, as the engine sees them: device_interface.StepHandle."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Int
from numpy.typing import NDArray

from jaxengine.batch import PackedStep
from jaxengine.logprobs import read_logprobs
from jaxengine.outputs import ItemLogprobs
from jaxengine.rule_arrays import RuleArrays
from jaxengine.scheduler_output import ScheduledRequest
from jaxengine.step_programs import Begun

__all__ = ["JaxStep", "JaxStepOfMany", "Launch", "StepResults"]


class StepResults(NamedTuple):
    """What a step computes for the host; the host fetches only what somebody wants.

    Attributes:
        sampled: a token for each sequence.
        logprobs: of these tokens, as in `jaxengine.logprobs`.
        prompt_logprobs: of the tokens after each packed token.
    """

    sampled: Int[Array, "S"]
    logprobs: Int[Array, "S F"]
    prompt_logprobs: Int[Array, "T F"]


class Launch(NamedTuple):
    """A step as the device was given it.

    Attributes:
        step: the step.
        sent: its packed buffer, on the host or on the device.
        rules: for the choice of its tokens.
        items: the scheduled requests.
    """

    step: PackedStep
    sent: NDArray[np.int32] | Int[Array, "_"]
    rules: RuleArrays
    items: Sequence[ScheduledRequest]


class JaxStep:
    """A launched step whose tokens are on their way to the host.

    Attributes:
        launch: what was launched.
        begun: where it will stand when its layers end, or are paused; None if it cannot be paused.
    """

    def __init__(self, results: StepResults, launch: Launch, begun: Begun | None = None) -> None:
        self.launch, self.begun = launch, begun
        self._results, self._step, self._items = results, launch.step, launch.items
        step = launch.step
        self.num_slots = step.num_slots
        results.sampled.copy_to_host_async()
        if step.logprobs:
            results.logprobs.copy_to_host_async()
        if step.prompt_logprobs:
            results.prompt_logprobs.copy_to_host_async()

    def is_done(self) -> bool:
        # Arrays have it, their type does not tell.
        return bool(self._results.sampled.is_ready())  # type: ignore[attr-defined]

    def result(self) -> Sequence[int]:
        token_ids: list[int] = np.asarray(self._results.sampled).tolist()
        return [token_ids[seq] for seq in self._step.sequences]

    def logprobs(self) -> Mapping[int, ItemLogprobs]:
        step, found = self._step, {}
        if step.logprobs:
            rows = np.asarray(self._results.logprobs)
            for index in step.logprobs:
                num_top = self._items[index].request.params.logprobs or 0
                sampled = read_logprobs(rows[step.sequences[index]], num_top)
                found[index] = ItemLogprobs(sampled, 0, ())
        if step.prompt_logprobs:
            rows = np.asarray(self._results.prompt_logprobs)
            for index, start, count in step.prompt_logprobs:
                item = self._items[index]
                num_top = item.request.params.prompt_logprobs or 0
                prompt = tuple(read_logprobs(row, num_top) for row in rows[start : start + count])
                sampled_too = found[index].sampled if index in found else None
                found[index] = ItemLogprobs(sampled_too, item.first_position + 1, prompt)
        return found


class JaxStepOfMany:
    """One of several launched steps whose tokens come to the host together."""

    def __init__(self, sampled: Int[Array, "K S"], index: int, step: PackedStep) -> None:
        self._sampled, self._index, self._step = sampled, index, step
        self.num_slots = step.num_slots

    def is_done(self) -> bool:
        return bool(self._sampled.is_ready())  # type: ignore[attr-defined]

    def result(self) -> Sequence[int]:
        token_ids: list[int] = np.asarray(self._sampled)[self._index].tolist()
        return [token_ids[seq] for seq in self._step.sequences]

    def logprobs(self) -> Mapping[int, ItemLogprobs]:
        return {}
