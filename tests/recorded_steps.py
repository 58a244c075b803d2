"""Steps as a server would have recorded them, with times that the test says."""

from collections.abc import Mapping, Sequence

from bench.simulation.step_file import RecordedShare, RecordedStep

__all__ = ["recorded", "step_body"]

type ShareTuple = tuple[str, int, int, bool]  # request, first position, tokens, samples


def recorded(
    index: int,
    start_s: float,
    end_s: float,
    shares: Sequence[ShareTuple],
    *,
    num_slots: int = 8,
    scheduled_s: float | None = None,
) -> RecordedStep:
    """A step; it is scheduled as it starts unless said otherwise."""
    return RecordedStep(
        index=index,
        scheduled_s=start_s if scheduled_s is None else scheduled_s,
        device_start_s=start_s,
        end_s=end_s,
        num_slots=num_slots,
        shares=tuple(RecordedShare(*share) for share in shares),
    )


def step_body(step: RecordedStep) -> Mapping[str, object]:
    """The step as /v1/steps sends it, as far as it is read."""
    return {
        "index": step.index,
        "scheduled_s": step.scheduled_s,
        "launched_s": step.device_start_s,
        "device_start_s": step.device_start_s,
        "end_s": step.end_s,
        "num_slots": step.num_slots,
        "shares": [
            {
                "request_id": share.request_id,
                "first_position": share.first_position,
                "num_tokens": share.num_tokens,
                "samples": share.samples,
            }
            for share in step.shares
        ],
    }
