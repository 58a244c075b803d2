"""A device model fitted to recorded steps, and how well it foretells a run.

    step = base of its bucket + a * decode context + b * prefill context + gap

fitted by least squares. With a base of its own, every bucket's times add up to what was measured,
so what is fitted is throughput. `gap` is how long the device stood idle between steps because the
host was late.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import numpy as np

from bench.simulation.device import StepLoad
from bench.simulation.step_file import RecordedStep
from bench.simulation.workload import Floats

__all__ = ["CalibratedDevice", "calibrate"]

# A step that took so many times the median of its bucket is a hiccup of the machine.
OUTLIER = 5.0

# Sums of contexts are large numbers; in these units the fit is well conditioned.
CONTEXT_UNIT = 1000.0

type BucketKey = tuple[bool, int]  # decode-only, slots


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibratedDevice:
    """A device that takes as long as a recorded one did.

    Attributes:
        base_s: seconds for each bucket seen: (decode-only, slots).
        decode_context_s, prefill_context_s: seconds per token attended to.
        gap_s: seconds that the device waits for the host, on average.
        fit_error: mean absolute error of a step over the mean step.
    """

    base_s: Mapping[BucketKey, float]
    decode_context_s: float
    prefill_context_s: float
    gap_s: float
    fit_error: float
    name: str = "calibrated"

    def step_s(self, load: StepLoad) -> float:
        return (
            self.bucket_s(load.decode_only, load.num_slots)
            + load.decode_context * self.decode_context_s
            + load.prefill_context * self.prefill_context_s
            + self.gap_s
        )

    def bucket_s(self, decode_only: bool, num_slots: int) -> float:
        """The base of a bucket; between and beyond those seen, in proportion to the slots."""
        known = self.base_s.get((decode_only, num_slots))
        if known is not None:
            return known
        kinds = {kind for kind, _ in self.base_s}
        kind = decode_only if decode_only in kinds else not decode_only
        points = sorted((slots, base) for (of, slots), base in self.base_s.items() if of == kind)
        if num_slots > points[-1][0]:
            return points[-1][1] * num_slots / points[-1][0]
        sizes, bases_s = zip(*points, strict=True)
        return float(np.interp(num_slots, np.array(sizes), np.array(bases_s)))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "base_s": [
                {"decode_only": decode_only, "num_slots": slots, "seconds": seconds}
                for (decode_only, slots), seconds in sorted(self.base_s.items())
            ],
            "decode_context_s": self.decode_context_s,
            "prefill_context_s": self.prefill_context_s,
            "gap_s": self.gap_s,
            "fit_error": self.fit_error,
        }


def calibrate(steps: Sequence[RecordedStep]) -> CalibratedDevice:
    """Fit a device to steps, which must be in order.

    Raises:
        ValueError: there is no step.
    """
    kept = without_outliers([step for step in steps if step.shares])
    if not kept:
        raise ValueError("there are no steps to calibrate with")
    keys = sorted({bucket_key(step) for step in kept})
    times_s = np.array([step.duration_s for step in kept])
    one_hot = np.array([[bucket_key(step) == key for key in keys] for step in kept], dtype=float)
    contexts = np.array([[step.decode_context, step.prefill_context] for step in kept])
    bases, slopes = fit(one_hot, contexts / CONTEXT_UNIT, times_s)
    predicted_s = one_hot @ bases + contexts / CONTEXT_UNIT @ slopes
    return CalibratedDevice(
        base_s=dict(zip(keys, bases.tolist(), strict=True)),
        decode_context_s=float(slopes[0]) / CONTEXT_UNIT,
        prefill_context_s=float(slopes[1]) / CONTEXT_UNIT,
        gap_s=mean_gap_s(steps),
        fit_error=float(np.abs(predicted_s - times_s).mean() / times_s.mean()),
    )


def bucket_key(step: RecordedStep) -> BucketKey:
    return step.decode_only, step.num_slots


def without_outliers(steps: Sequence[RecordedStep]) -> list[RecordedStep]:
    """Leave out what took far longer than its like."""
    times_s: dict[BucketKey, list[float]] = defaultdict(list)
    for step in steps:
        times_s[bucket_key(step)].append(step.duration_s)
    typical_s = {key: median(values) for key, values in times_s.items()}
    return [step for step in steps if step.duration_s <= OUTLIER * typical_s[bucket_key(step)]]


def fit(one_hot: Floats, contexts: Floats, times_s: Floats) -> tuple[Floats, Floats]:
    """Least squares with slopes that are not negative: one that would be is left out."""
    slopes = np.zeros(contexts.shape[1])
    # A context that is the same in all steps of a bucket cannot be told from the bucket's base.
    means = one_hot.T @ contexts / one_hot.sum(axis=0)[:, None]
    varies = np.abs(contexts - one_hot @ means).max(axis=0) > 1e-9 * contexts.max(axis=0)
    used = [column for column in range(contexts.shape[1]) if varies[column]]
    while True:
        features = np.hstack([one_hot, contexts[:, used]])
        solution, *_ = np.linalg.lstsq(features, times_s, rcond=None)
        found = solution[one_hot.shape[1] :]
        if len(used) == 0 or found.min() >= 0:
            slopes[used] = found
            return solution[: one_hot.shape[1]], slopes
        used.pop(int(found.argmin()))


def mean_gap_s(steps: Sequence[RecordedStep]) -> float:
    """How long the device waited for a step that the host had begun to schedule in time."""
    gaps_s = [
        max(0.0, after.device_start_s - before.end_s)
        for before, after in pairwise(steps)
        if after.index == before.index + 1 and after.scheduled_s <= before.end_s
    ]
    return fmean(gaps_s) if gaps_s else 0.0
