"""How long a step will take: a linear model that is fitted while serving.

    time = pace x (base
                   + context slope x (decode_context + chunk_context)
                   + prefill slope x prefill_context
                   + sampling slope x rows that are drawn at random)

A decode and a chunk both read their context once; a chunk of many tokens computes more with it.

What the base goes by, the device says. One that computes whole buckets has a base for each, and
draws all rows of the bucket at random if it draws one. One that leaves padding out computes tokens
and rows: its base is a line through the sizes of the buckets, with a bend at each, and ends at a
single token.

The bases come from the warm-up, which runs every bucket without sequences; the slopes start at
nothing and are learned from the first steps on. Both are then followed by a Kalman filter, with
two guards that serving needs:

* Forgetting is exponential resetting (Salgado, Goodwin and Middleton, 1988): with every step the
  covariance moves a little way to a fixed one. What the traffic says nothing about keeps its value
  and becomes uncertain, but only so far; plain forgetting would let the covariance wind up while
  the traffic is constant.
* Errors are weighted as in Huber's estimator, beyond a bound in standard deviations: a step that
  the operating system disturbed moves the fit no more than an unlucky one.

The pace is of a machine that others use, too: it is slow for some dozen steps, and quick again. It
follows the last few steps, and what these take is divided by it before the fit learns of them.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from jaxengine.buckets import Bucket

__all__ = ["StepTimeModel", "StepWork"]

# How far the bases may be off what the warm-up measured, as standard deviations: all together,
# because the machine is busier now, and every bucket for itself.
COMMON_BASE_SPREAD = 0.2
OWN_BASE_SPREAD = 0.1

# The slopes begin at zero. So far they may be from it, as shares of what the largest bucket costs
# per token: a position that a decode attends to, one that a prompt token does, a drawn row. About
# what a model of 135M parameters shows on a CPU; larger ones have smaller shares.
SLOPE_SPREADS = (0.01, 0.002, 10.0)

# Later a slope that no step has shown for long is uncertain by this part of it.
RESTING_SLOPE_SPREAD = 0.1

# Share of the way to the resting covariance in every step: a machine that becomes half as fast
# is followed in about 20 steps.
FORGETTING = 0.005

# Errors teach up to so many standard deviations, about as Huber chose.
CLIP = 1.5

# The spread of errors: where it begins, the least, how fast it follows per step, and what an error
# counts for at most, as a multiple of it.
FIRST_SPREAD = 0.1
LEAST_SPREAD = 0.01
SPREAD_RATE = 0.02
SPREAD_CLIP = 3

# How fast the pace follows the last steps, and the most that one counts for: 2 % in all.
PACE_RATE = 0.2
PACE_CLIP = 0.1

# A base falls to no less than this share of the time of the warm-up, so that times are positive.
LEAST_BASE = 0.01

# Mean absolute error of a normal distribution to its standard deviation.
SPREAD_TO_DEVIATION = math.sqrt(math.pi / 2)


class StepWork(NamedTuple):
    """What a step has the device do.

    Attributes:
        num_tokens: token slots taken, padding of static batches included.
        num_seqs: sequences with tokens in the step.
        decode_only: every one of them has a single token.
        decode_context: positions that sequences with a single token attend to, in all.
        prefill_context: positions that the tokens of all others attend to, in all.
        num_sampled: sequences whose next token is drawn at random.
        chunk_context: positions up to the last token of each sequence with several, in all.
    """

    num_tokens: int
    num_seqs: int
    decode_only: bool
    decode_context: int
    prefill_context: int
    num_sampled: int
    chunk_context: int


class StepTimeModel:
    """Predicts how long the device takes for a step, and learns from how long it took.

    Args:
        buckets: the compiled sizes; a step takes the smallest that holds it.
        bucket_times_s: how long each takes without any sequences, all its slots computed.
        skips_padding: the device computes the tokens and rows of a step, not its bucket.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        bucket_times_s: Mapping[Bucket, float],
        *,
        skips_padding: bool = False,
    ) -> None:
        if not all(bucket_times_s[bucket] > 0 for bucket in buckets):
            raise ValueError(f"bucket times must be positive, got {dict(bucket_times_s)}")
        # In the order of `smallest_bucket`, so that the first one that holds a step is its bucket.
        sizes = sorted(buckets, key=lambda b: (b.num_tokens, b.num_seqs, not b.decode_only))
        if skips_padding:  # of two equal sizes one says it all
            sizes = [bucket for bucket in sizes if not bucket.decode_only]
        bases = [bucket_times_s[bucket] for bucket in sizes]
        token_s = bases[-1] / sizes[-1].num_tokens
        if skips_padding:
            # A single token should take less than the smallest bucket: how much less is learned.
            sizes, bases = [Bucket(1, 1, False), *sizes], [bases[0], *accumulate(bases, max)]
        self._sizes = sizes
        self._skips_padding = skips_padding
        self._parameters = [*bases, 0.0, 0.0, 0.0]
        self._least = [*(base * LEAST_BASE for base in bases), 0.0, 0.0, 0.0]
        slope_spreads_s = [token_s * spread for spread in SLOPE_SPREADS]
        self._covariance = _covariance(bases, slope_spreads_s)
        self._resting_covariance = _covariance(
            bases, [spread_s * RESTING_SLOPE_SPREAD for spread_s in slope_spreads_s]
        )
        self._spread = FIRST_SPREAD
        self._pace = 1.0

    @property
    def base_times_s(self) -> dict[Bucket, float]:
        """What a step of each size costs now, besides its contexts and what it draws."""
        bases = [self._pace * value for value in self._parameters[:-3]]
        return dict(zip(self._sizes, bases, strict=True))

    @property
    def slopes_s(self) -> tuple[float, float, float]:
        """Time per position read, per position that a prompt token attends to, and drawn row."""
        context, prefill, sampling = (self._pace * value for value in self._parameters[-3:])
        return context, prefill, sampling

    @property
    def spread(self) -> float:
        """Mean relative error of the last steps, outliers clipped."""
        return self._spread

    def predict(self, work: StepWork) -> float:
        """Return the seconds that a step is expected to take.

        Raises:
            ValueError: no bucket holds it.
        """
        return self._pace * self._time_s(self._index_of_size(work), work)

    def observe(self, work: StepWork, duration_s: float) -> float:
        """Learn how long a step took.

        Returns:
            By how many seconds it took longer than predicted before.

        Raises:
            ValueError: no bucket holds it.
        """
        index = self._index_of_size(work)
        predicted_s = self._time_s(index, work)
        # Here and below: at a pace of one.
        error_s = duration_s / self._pace - predicted_s
        features = self._features(index, work)
        # Covariance of each parameter with the prediction.
        shared = [sum(row[i] * value for i, value in features) for row in self._covariance]
        variance = (SPREAD_TO_DEVIATION * self._spread * predicted_s) ** 2
        variance += sum(shared[i] * value for i, value in features)
        most_s = CLIP * math.sqrt(variance)
        # Huber's weight: a step beyond the bound teaches less, and is less to be sure of.
        weight = 1.0 if abs(error_s) <= most_s else most_s / abs(error_s)
        gain = weight / variance
        self._parameters = [
            max(value + of_value * gain * error_s, least)
            for value, of_value, least in zip(self._parameters, shared, self._least, strict=True)
        ]
        if self._skips_padding:  # more tokens never take less time
            self._parameters[:-3] = accumulate(self._parameters[:-3], max)
        keep = 1 - FORGETTING
        self._covariance = [
            [
                keep * (now - of_row * of_column * gain) + FORGETTING * resting
                for now, of_column, resting in zip(row, shared, resting_row, strict=True)
            ]
            for row, resting_row, of_row in zip(
                self._covariance, self._resting_covariance, shared, strict=True
            )
        ]
        relative_error = error_s / predicted_s
        self._learn_spread(relative_error)
        observed_error_s = error_s * self._pace
        self._pace *= 1 + PACE_RATE * min(max(relative_error, -PACE_CLIP), PACE_CLIP)
        return observed_error_s

    def most_prefill_tokens(
        self, limit_s: float, work: StepWork, *, first_position: int, at_most: int
    ) -> int:
        """Return how many tokens of a prompt to add to a step that must end in time.

        All of them if that fits, else the number that prefills fastest. Where bases go by buckets
        that is the most that fit, or what fills a smaller bucket, if the next one would be nearly
        as dear with few tokens in it as full; where they go by tokens, the most that fit, but for
        sizes from which on tokens are far dearer. May be off where the prompt ends and is the
        first to be sampled at random.

        Args:
            limit_s: how long the step should take.
            work: the step so far.
            first_position: of the tokens in their prompt.
            at_most: tokens that are left of it, or of the budget.

        Returns:
            A number from 0, where not even one fits, to `at_most`.

        Raises:
            ValueError: no bucket holds the step so far.
        """
        position_s, pair_s = self._parameters[-3:-1]
        left_s = limit_s / self._pace - pair_s * work.prefill_context
        left_s -= position_s * work.chunk_context
        # The attention of prompts costs much the same however they are cut: no part of their speed.
        rest = work._replace(prefill_context=0, chunk_context=0)
        # Prompt tokens so far, but for one of each prompt.
        num_before = work.num_tokens - work.num_seqs
        best, best_speed = 0, num_before / self._time_s(self._index_of_size(rest), rest)
        num_filled = 0  # up to the sizes before
        for index, size in enumerate(self._sizes):
            room = min(size.num_tokens - work.num_tokens, at_most)
            if size.decode_only or work.num_seqs >= size.num_seqs or room <= num_filled:
                continue
            # On the way to this size; the base at the tokens that there are is on that line, too.
            token_s, rest_s = self._token_s(index), self._time_s(index, rest)
            num_fitting = _most_tokens(
                left_s - rest_s - position_s * first_position,
                token_s + position_s,
                pair_s,
                first_position,
                room,
            )
            if num_fitting > num_filled:
                if num_fitting == at_most:
                    return at_most
                speed = (num_before + num_fitting) / (rest_s + token_s * num_fitting)
                if speed > best_speed:
                    best, best_speed = num_fitting, speed
            num_filled = room
        return best

    def _index_of_size(self, work: StepWork) -> int:
        for index, (num_tokens, num_seqs, decode_only) in enumerate(self._sizes):
            if (
                work.num_tokens <= num_tokens
                and work.num_seqs <= num_seqs
                and (work.decode_only or not decode_only)
            ):
                return index
        raise ValueError(f"no bucket holds {work.num_tokens} tokens of {work.num_seqs} sequences")

    def _features(self, index: int, work: StepWork) -> Sequence[tuple[int, float]]:
        """Return which parameters make up the time of a step, and what each is multiplied with.

        Args:
            index: of a size that holds it.
            work: the step.
        """
        slopes = len(self._sizes)
        num_drawn = work.num_sampled
        if not self._skips_padding:
            base = [(index, 1.0)]
            # If one row is drawn at random, all rows of the bucket are.
            num_drawn = num_drawn and self._sizes[index].num_seqs
        elif index == 0:
            base = [(index, 1.0)]
        else:
            before, size = self._sizes[index - 1].num_tokens, self._sizes[index].num_tokens
            share = (work.num_tokens - before) / (size - before)
            base = [(index - 1, 1 - share), (index, share)]
        return (
            *base,
            (slopes, work.decode_context + work.chunk_context),
            (slopes + 1, work.prefill_context),
            (slopes + 2, num_drawn),
        )

    def _time_s(self, index: int, work: StepWork) -> float:
        """Return the time, at a pace of one, of a step that is or were on the way to a size."""
        return sum(self._parameters[i] * value for i, value in self._features(index, work))

    def _token_s(self, index: int) -> float:
        """Return by how much the base grows with each token on the way to a size."""
        if not self._skips_padding or index == 0:
            return 0.0
        before, size = self._sizes[index - 1 : index + 1]
        before_s, size_s = self._parameters[index - 1 : index + 1]
        return (size_s - before_s) / (size.num_tokens - before.num_tokens)

    def _learn_spread(self, relative_error: float) -> None:
        """Follow the mean absolute error."""
        clipped = min(abs(relative_error), SPREAD_CLIP * self._spread)
        self._spread = max(self._spread + SPREAD_RATE * (clipped - self._spread), LEAST_SPREAD)


def _covariance(bases_s: list[float], slope_spreads_s: list[float]) -> list[list[float]]:
    """Return the covariance of the bases, which go along with each other, and the slopes."""
    of_bases = [
        [
            base_s * other_s * (COMMON_BASE_SPREAD**2 + OWN_BASE_SPREAD**2 * (i == j))
            for j, other_s in enumerate(bases_s)
        ]
        + [0.0] * len(slope_spreads_s)
        for i, base_s in enumerate(bases_s)
    ]
    of_slopes = [
        [0.0] * len(bases_s) + [spread_s**2 * (i == j) for j in range(len(slope_spreads_s))]
        for i, spread_s in enumerate(slope_spreads_s)
    ]
    return of_bases + of_slopes


def _most_tokens(
    left_s: float, token_s: float, pair_s: float, first_position: int, room: int
) -> int:
    """Return how many of `room` tokens from a position on can attend in the time that is left.

    Each takes `token_s`, and n tokens attend to n (2 first_position + n + 1) / 2 positions.
    """
    if left_s < 0:
        return 0
    one_s = token_s + pair_s * (first_position + 0.5)
    if one_s * room + pair_s * room * room / 2 <= left_s:
        return room
    return int(2 * left_s / (one_s + math.sqrt(one_s * one_s + 2 * pair_s * left_s)))
