"""The packed buffer of a step: which arrays lie in it, and what the device makes of them.

The host writes all arrays of a step into one int32 buffer; the compiled programs slice it again.
One transfer and one argument, instead of sixteen of each. Floats travel as their bits. What says
how tokens are chosen is at its end, because that is a program of its own.

Letters: T packed tokens, S sequences, M blocks per sequence, W prefill tiles.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import NDArray

from jaxengine.buckets import Bucket
from jaxengine.sampling_params import MAX_STOP_TOKEN_IDS
from kernels_pallas.work_plan import (
    DECODE_SPLIT_FIELDS,
    PREFILL_TILE_FIELDS,
    AttentionBatch,
    max_decode_splits,
    max_prefill_tiles,
)

__all__ = [
    "PENALTIES",
    "BatchLayout",
    "ChoiceBatch",
    "ChoiceLayout",
    "RulesBatch",
    "SamplingBatch",
    "ScheduledBatch",
]

# Flags of a step that are not zero if some sequence needs what they name.
_FLAGS = (
    *("any_random", "any_filtered", "any_suppressed", "any_logprobs"),
    *("any_biased", "any_penalized", "any_masked"),
)
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")

type _Shapes = dict[str, tuple[int, ...]]


class SamplingBatch(NamedTuple):
    """How the next token of each sequence is chosen. A pytree of device arrays.

    Attributes:
        temperature, top_k, top_p, min_p: as in SamplingParams.
        seed: the 64-bit seed as two halves.
        position: of the token to be sampled.
        suppressed_ids: ids that must not be sampled; -1 where unused.
        any_random, any_filtered, any_suppressed: whether some sequence needs it at all.
    """

    temperature: Float[Array, "S"]
    top_k: Int[Array, "S"]
    top_p: Float[Array, "S"]
    min_p: Float[Array, "S"]
    seed: Int[Array, "S 2"]
    position: Int[Array, "S"]
    suppressed_ids: Int[Array, "S I"]
    any_random: Array
    any_filtered: Array
    any_suppressed: Array


class RulesBatch(NamedTuple):
    """Rules about tokens, besides RuleArrays. A pytree of device arrays.

    Attributes:
        presence_penalty, frequency_penalty, repetition_penalty: as in SamplingParams; zeros for
            sequences without penalties.
        any_biased, any_penalized, any_masked: whether some sequence needs it at all.
    """

    presence_penalty: Float[Array, "S"]
    frequency_penalty: Float[Array, "S"]
    repetition_penalty: Float[Array, "S"]
    any_biased: Array
    any_penalized: Array
    any_masked: Array


class ChoiceBatch(NamedTuple):
    """How a step's tokens are chosen. A pytree of device arrays.

    Attributes:
        rows: row of each sequence in the device state; the spare row where nothing is sampled, one
            beyond it, which there is not, for what is sampled and not remembered.
        any_logprobs: whether some sequence wants log-probabilities at all.
    """

    rows: Int[Array, "S"]
    sampling: SamplingBatch
    rules: RulesBatch
    any_logprobs: Array

    @property
    def takes_largest(self) -> Array:
        """Whether every sequence gets its largest logit as it is, and nothing else is asked for."""
        sampling, rules = self.sampling, self.rules
        changes = rules.any_biased | rules.any_penalized | rules.any_masked
        return ~(sampling.any_random | sampling.any_suppressed | changes | self.any_logprobs)


class ScheduledBatch(NamedTuple):
    """One step as the layers see it. A pytree of device arrays.

    Attributes:
        token_ids: literal ids, or -1 - r for "the last token of row r", known only here.
        positions: absolute position of each token in its sequence.
        sample_indices: packed index of the token after which each sequence is sampled.
        num_slots: tokens, and slots that are computed though they hold none.
        targets: prompt token after each token, where its log-probability is wanted, else -1; of
            no use (and without elements) where every sequence has one token.
        any_targets: whether some sequence wants those of prompt tokens at all.
        serial: number of the step, as of Decoder.go_on; 0 where it cannot be paused.
    """

    token_ids: Int[Array, "T"]
    positions: Int[Array, "T"]
    sample_indices: Int[Array, "S"]
    num_slots: Int[Array, ""]
    attention: AttentionBatch
    targets: Int[Array, "T"]
    any_targets: Array
    serial: Int[Array, ""]


@dataclass(frozen=True)
class ChoiceLayout:
    """Where each array that says how tokens are chosen lies in the end of the packed buffer."""

    num_seqs: int
    num_eos_token_ids: int

    @cached_property
    def shapes(self) -> _Shapes:
        seqs = self.num_seqs
        return {
            "rows": (seqs,),  # first: keep_rows
            "temperature": (seqs,),
            "top_k": (seqs,),
            "top_p": (seqs,),
            "min_p": (seqs,),
            "seed": (seqs, 2),
            "position": (seqs,),
            "suppressed_ids": (seqs, MAX_STOP_TOKEN_IDS + self.num_eos_token_ids),
            **dict.fromkeys(PENALTIES, (seqs,)),
            **dict.fromkeys(_FLAGS, ()),
        }

    @cached_property
    def size(self) -> int:
        """Elements of this part of the buffer."""
        return _num_elements(self.shapes)

    def keep_rows(
        self, packed: Int[Array, "_"], keep: Bool[Array, ""], *, spare_row: int
    ) -> Int[Array, "_"]:
        """Return this part of a device buffer so that it samples nothing, unless `keep`."""
        rows = packed[: self.num_seqs]
        return packed.at[: self.num_seqs].set(jnp.where(keep, rows, spare_row))

    def unpack(self, packed: Int[Array, "_"]) -> ChoiceBatch:
        """Slice this part of a device buffer. Traced inside the compiled program."""
        arrays = _slices(self.shapes, packed)
        floats = {
            name: lax.bitcast_convert_type(arrays[name], jnp.float32)
            for name in ("temperature", "top_p", "min_p", *PENALTIES)
        }
        flags = {name: arrays[name] > 0 for name in _FLAGS}
        return ChoiceBatch(
            rows=arrays["rows"],
            sampling=SamplingBatch(
                **{name: floats[name] for name in ("temperature", "top_p", "min_p")},
                **{name: arrays[name] for name in ("top_k", "seed", "position", "suppressed_ids")},
                **{name: flags[name] for name in ("any_random", "any_filtered", "any_suppressed")},
            ),
            rules=RulesBatch(
                **{name: floats[name] for name in PENALTIES},
                **{name: flags[name] for name in ("any_biased", "any_penalized", "any_masked")},
            ),
            any_logprobs=flags["any_logprobs"],
        )


@dataclass(frozen=True)
class BatchLayout:
    """Where each array of a bucket lies in the packed buffer.

    Attributes:
        sliding_window: of the layers that have one.
    """

    bucket: Bucket
    max_blocks_per_seq: int
    num_eos_token_ids: int
    sliding_window: int | None = None

    @property
    def choice(self) -> ChoiceLayout:
        """The layout of the buffer's end."""
        return ChoiceLayout(self.bucket.num_seqs, self.num_eos_token_ids)

    @cached_property
    def shapes(self) -> _Shapes:
        tokens, seqs, decode_only = self.bucket
        windows: _Shapes = {}
        if self.sliding_window is not None:
            most = max_decode_splits(seqs, sliding_window=self.sliding_window)
            windows["window_splits"] = (most, DECODE_SPLIT_FIELDS)
            windows["window_split_starts"] = (seqs + 1,)
        return {
            "token_ids": (tokens,),
            "positions": (tokens,),
            "slot_mapping": (tokens,),
            "query_start_loc": (seqs + 1,),
            "seq_lens": (seqs,),
            "block_tables": (seqs, self.max_blocks_per_seq),
            "sample_indices": (seqs,),
            "prefill_tiles": (max_prefill_tiles(tokens, seqs), PREFILL_TILE_FIELDS),
            "decode_splits": (max_decode_splits(seqs), DECODE_SPLIT_FIELDS),
            "split_starts": (seqs + 1,),
            **windows,
            "num_slots": (),
            "num_decodes": (),
            "num_prefill_tiles": (),
            "targets": (0 if decode_only else tokens,),
            "any_targets": (),
            "serial": (),
            **self.choice.shapes,
        }

    @cached_property
    def size(self) -> int:
        """Elements of the packed buffer."""
        return _num_elements(self.shapes)

    def views(self, packed: NDArray[np.int32]) -> dict[str, NDArray[np.int32]]:
        """Return the arrays as views into a host buffer, to be filled in place."""
        return _slices(self.shapes, packed)

    def unpack(self, packed: Int[Array, "_"]) -> ScheduledBatch:
        """Slice a device buffer, but for its end. Traced inside the compiled program."""
        arrays = _slices(self.shapes, packed)
        return ScheduledBatch(
            token_ids=arrays["token_ids"],
            positions=arrays["positions"],
            sample_indices=arrays["sample_indices"],
            num_slots=arrays["num_slots"],
            attention=AttentionBatch(
                **{name: arrays[name] for name in AttentionBatch._fields if name in arrays}
            ),
            targets=arrays["targets"],
            any_targets=arrays["any_targets"] > 0,
            serial=arrays["serial"],
        )


def _num_elements(shapes: _Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _slices[A: (NDArray[np.int32], Array)](shapes: _Shapes, packed: A) -> dict[str, A]:
    """Return the arrays that lie in a buffer one after the other."""
    arrays, start = {}, 0
    for name, shape in shapes.items():
        end = start + math.prod(shape)
        arrays[name] = packed[start:end].reshape(shape)
        start = end
    return arrays
