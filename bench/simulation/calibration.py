"""A device model fitted to recorded steps, and how well it foretells a run.

    step = base of its bucket + a * decode context + b * prefill context + gap

fitted by least squares. With a base of its own, every bucket's times add up to what was measured,
so what is fitted is throughput. `gap` is how long the device stood idle between steps because the
host was late.

Where the device leaves out the padding of buckets, the base is a function of the tokens instead:
straight between sizes that are fixed here.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
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

# Where a base that goes by tokens may bend.
SIZES = (1, 8, 16, 32, 64, 96, 128, 192, *(256 << n for n in range(8)))

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
    busy = [step for step in steps if step.shares]
    if not busy:
        raise ValueError("there are no steps to calibrate with")
    skips_padding = all(step.num_slots == step.num_tokens for step in busy)
    kept = without_outliers(busy, size_key if skips_padding else bucket_key)
    keys, shares = tokens_as_features(kept) if skips_padding else buckets_as_features(kept)
    times_s = np.array([step.duration_s for step in kept])
    contexts = np.array([[step.decode_context, step.prefill_context] for step in kept])
    bases, slopes = fit(shares, contexts / CONTEXT_UNIT, times_s)
    predicted_s = shares @ bases + contexts / CONTEXT_UNIT @ slopes
    return CalibratedDevice(
        base_s=dict(zip(keys, bases.tolist(), strict=True)),
        decode_context_s=float(slopes[0]) / CONTEXT_UNIT,
        prefill_context_s=float(slopes[1]) / CONTEXT_UNIT,
        gap_s=mean_gap_s(steps),
        fit_error=float(np.abs(predicted_s - times_s).mean() / times_s.mean()),
    )


def bucket_key(step: RecordedStep) -> BucketKey:
    return step.decode_only, step.num_slots


def size_key(step: RecordedStep) -> BucketKey:
    return False, next((size for size in SIZES if size >= step.num_slots), SIZES[-1])


def buckets_as_features(steps: Sequence[RecordedStep]) -> tuple[list[BucketKey], Floats]:
    """Return the buckets, and for each step a one for its own."""
    keys = sorted({bucket_key(step) for step in steps})
    return keys, np.array([[bucket_key(step) == key for key in keys] for step in steps], float)


def tokens_as_features(steps: Sequence[RecordedStep]) -> tuple[list[BucketKey], Floats]:
    """Return sizes, and for each step its shares of the two that it lies between."""
    tokens = np.array([step.num_slots for step in steps], float)
    ends = {int(tokens.min()), int(tokens.max())}
    sizes = sorted(ends | {size for size in SIZES if min(ends) < size < max(ends)})
    while True:
        shares = np.column_stack([np.interp(tokens, sizes, row) for row in np.eye(len(sizes))])
        seen = [size for size, weight in zip(sizes, shares.sum(axis=0), strict=True) if weight > 0]
        if len(seen) == len(sizes):
            return [(False, size) for size in sizes], shares
        sizes = seen


def without_outliers(
    steps: Sequence[RecordedStep], key_of: Callable[[RecordedStep], BucketKey]
) -> list[RecordedStep]:
    """Leave out what took far longer than its like."""
    times_s: dict[BucketKey, list[float]] = defaultdict(list)
    for step in steps:
        times_s[key_of(step)].append(step.duration_s)
    typical_s = {key: median(values) for key, values in times_s.items()}
    return [step for step in steps if step.duration_s <= OUTLIER * typical_s[key_of(step)]]


def fit(shares: Floats, contexts: Floats, times_s: Floats) -> tuple[Floats, Floats]:
    """Least squares with slopes that are not negative: one that would be is left out."""
    slopes = np.zeros(contexts.shape[1])
    # A context that is the same in all steps of a bucket cannot be told from the bucket's base.
    means = shares.T @ contexts / shares.sum(axis=0)[:, None]
    varies = np.abs(contexts - shares @ means).max(axis=0) > 1e-9 * contexts.max(axis=0)
    used = [column for column in range(contexts.shape[1]) if varies[column]]
    while True:
        features = np.hstack([shares, contexts[:, used]])
        solution, *_ = np.linalg.lstsq(features, times_s, rcond=None)
        found = solution[shares.shape[1] :]
        if len(used) == 0 or found.min() >= 0:
            slopes[used] = found
            return solution[: shares.shape[1]], slopes
        used.pop(int(found.argmin()))


def mean_gap_s(steps: Sequence[RecordedStep]) -> float:
    """How long the device waited for a step that the host had begun to schedule in time."""
    gaps_s = [
        max(0.0, after.device_start_s - before.end_s)
        for before, after in pairwise(steps)
        if after.index == before.index + 1 and after.scheduled_s <= before.end_s
    ]
    return fmean(gaps_s) if gaps_s else 0.0
