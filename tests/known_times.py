"""A model of step times that is known beforehand and can be computed by hand."""

from jaxengine.step_time import StepTimeModel, StepWork

__all__ = ["KnownTimes"]


class KnownTimes(StepTimeModel):
    """A step takes 10 ms, and 1 ms for each token and for each 10 positions attended to.

    It is known beforehand, and nothing that is observed changes it.
    """

    def __init__(self, position_s: float = 0.0001) -> None:
        self.observed: list[tuple[StepWork, float]] = []
        self._position_s = position_s

    def predict(self, work: StepWork) -> float:
        attended = work.decode_context + work.prefill_context
        return 0.010 + 0.001 * work.num_tokens + self._position_s * attended

    @property
    def slopes_s(self) -> tuple[float, float, float]:
        # Prompts read nothing of their own, in these predictions; that streams do costs as much.
        return (self._position_s, self._position_s, 0.0)

    def observe(self, work: StepWork, duration_s: float) -> float:
        self.observed.append((work, duration_s))
        return 0.0

    def most_prefill_tokens(
        self, limit_s: float, work: StepWork, *, first_position: int, at_most: int
    ) -> int:
        count = 0
        while count < at_most:
            count += 1
            pairs = sum(range(first_position + 1, first_position + count + 1))
            more = work._replace(
                num_tokens=work.num_tokens + count, prefill_context=work.prefill_context + pairs
            )
            if self.predict(more) > limit_s + 1e-9:
                return count - 1
        return count
