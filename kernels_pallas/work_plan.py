"""What the attention of one step has to do, decided once on the host and shared by all layers.

Sequences with one query token (decodes) come first in the packed batch, so that they are a
dense array; the others (prefill chunks) are cut into query tiles of a fixed size.

A GPU also cuts the context of a decode into splits, so that a few long sequences keep all of it
busy. How many depends on the length alone: a sum over context has the same order whoever shares
the step. Layers with a sliding window have a plan of their own, of what the window leaves.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Int
from numpy.typing import NDArray

__all__ = [
    "DECODE_SPLIT_FIELDS",
    "PREFILL_TILE_FIELDS",
    "QUERY_TILE",
    "AttentionBatch",
    "max_decode_splits",
    "max_prefill_tiles",
    "plan_decode_splits",
    "plan_prefill_tiles",
]

# Query tokens per prefill tile.
QUERY_TILE = 64

# Columns of a prefill tile: sequence, first packed token, its position, query tokens.
PREFILL_TILE_FIELDS = 4

# Context tokens of a decode's split: enough that its partial sums are about a hundredth of what it
# reads, with four query heads to a kv head.
SPLIT_TOKENS = 512

# The most splits of one sequence; with more context they are longer.
MAX_SPLITS = 32

# Splits begin at multiples of this, so that no implementation's tile crosses one.
SPLIT_MULTIPLE = 128

# Columns of a decode split: sequence, first position, position after the last.
DECODE_SPLIT_FIELDS = 3


class AttentionBatch(NamedTuple):
    """Where the packed tokens of a step belong. A pytree of device arrays.

    Attributes:
        slot_mapping: slot (block * block_size + offset) of each token; padding goes to block 0.
        query_start_loc: sequence s owns tokens [query_start_loc[s], query_start_loc[s + 1]).
        seq_lens: tokens in cache after this step; 0 for padding rows.
        block_tables: block ids of each sequence; entries past its length may hold anything.
        num_decodes: leading sequences with exactly one query token; sequence s < num_decodes
            therefore owns token s.
        prefill_tiles: plan_prefill_tiles of the rest.
        num_prefill_tiles: rows of `prefill_tiles` in use.
        decode_splits: plan_decode_splits of the decodes.
        split_starts: sequence s owns rows [split_starts[s], split_starts[s + 1]) of
            `decode_splits`; what is no decode owns none.
        window_splits, window_split_starts: likewise for layers with a sliding window; None where
            no layer has one.
    """

    slot_mapping: Int[Array, "T"]
    query_start_loc: Int[Array, "S+1"]
    seq_lens: Int[Array, "S"]
    block_tables: Int[Array, "S M"]
    num_decodes: Int[Array, ""]
    prefill_tiles: Int[Array, "W 4"]
    num_prefill_tiles: Int[Array, ""]
    decode_splits: Int[Array, "X 3"]
    split_starts: Int[Array, "S+1"]
    window_splits: Int[Array, "Y 3"] | None = None
    window_split_starts: Int[Array, "S+1"] | None = None

    def splits(self, sliding_window: int | None) -> tuple[Int[Array, "X 3"], Int[Array, "S+1"]]:
        """Return the splits for such a layer, and where those of each sequence begin.

        Raises:
            ValueError: the plan has none for a sliding window.
        """
        if sliding_window is None:
            return self.decode_splits, self.split_starts
        if self.window_splits is None or self.window_split_starts is None:
            raise ValueError("the batch was planned without a sliding window")
        return self.window_splits, self.window_split_starts


def max_prefill_tiles(num_tokens: int, num_seqs: int) -> int:
    """Return the most tiles that T packed tokens of S sequences can need."""
    return num_tokens // QUERY_TILE + min(num_seqs, num_tokens)


def plan_prefill_tiles(
    query_start_loc: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    num_decodes: int,
    out: NDArray[np.int32],
) -> int:
    """Cut the query tokens of sequences `num_decodes`.. into tiles.

    Args:
        query_start_loc: i32[S + 1] for the real sequences.
        seq_lens: i32[S], tokens in cache after this step.
        num_decodes: leading sequences that have exactly one query token.
        out: i32[W, 4], filled from the top, in packed order.

    Returns:
        The number of tiles.
    """
    starts = query_start_loc[num_decodes:-1]
    query_lens = query_start_loc[num_decodes + 1 :] - starts
    if len(starts) == 0:
        return 0
    first_positions = seq_lens[num_decodes:] - query_lens
    tiles_per_seq = -(-query_lens // QUERY_TILE)
    num_tiles = int(tiles_per_seq.sum())
    seq = np.repeat(np.arange(len(starts)), tiles_per_seq)
    # Offset of each tile inside its sequence's chunk.
    before = np.cumsum(tiles_per_seq) - tiles_per_seq
    offset = (np.arange(num_tiles) - np.repeat(before, tiles_per_seq)) * QUERY_TILE
    out[:num_tiles, 0] = seq + num_decodes
    out[:num_tiles, 1] = starts[seq] + offset
    out[:num_tiles, 2] = first_positions[seq] + offset
    out[:num_tiles, 3] = np.minimum(query_lens[seq] - offset, QUERY_TILE)
    return num_tiles


def max_decode_splits(num_seqs: int, *, sliding_window: int | None = None) -> int:
    """Return the most splits that S sequences can need."""
    if sliding_window is None:
        return num_seqs * MAX_SPLITS
    # The window may begin just before a multiple, where the first split does.
    return num_seqs * min(MAX_SPLITS, -(-(sliding_window + SPLIT_MULTIPLE - 1) // SPLIT_TOKENS))


def plan_decode_splits(
    seq_lens: NDArray[np.int32],
    num_decodes: int,
    out: NDArray[np.int32],
    starts: NDArray[np.int32],
    *,
    sliding_window: int | None = None,
) -> None:
    """Cut the contexts of sequences 0..num_decodes-1 into splits of equal size.

    Every split holds a position that its sequence sees: none lies wholly before the window.

    Args:
        seq_lens: i32[S], tokens in cache after this step.
        num_decodes: leading sequences that have exactly one query token.
        out: i32[X, 3], filled from the top; see `AttentionBatch.decode_splits`.
        starts: i32[S + 1 or more], filled whole; see `AttentionBatch.split_starts`.
        sliding_window: as of `ragged_paged_attention`.
    """
    lens = seq_lens[:num_decodes]
    begins = np.zeros_like(lens)
    if sliding_window is not None:
        begins = np.maximum(lens - sliding_window, 0) // SPLIT_MULTIPLE * SPLIT_MULTIPLE
    visited = lens - begins
    needed = np.minimum(-(-visited // SPLIT_TOKENS), MAX_SPLITS)
    sizes = -(-visited // np.maximum(needed * SPLIT_MULTIPLE, 1)) * SPLIT_MULTIPLE
    # Rounded up, they may cover the context in fewer.
    counts = -(-visited // np.maximum(sizes, 1))
    starts[0] = 0
    np.cumsum(counts, dtype=np.int32, out=starts[1 : num_decodes + 1])
    starts[num_decodes + 1 :] = starts[num_decodes]
    num_splits = int(starts[num_decodes])
    seq = np.repeat(np.arange(num_decodes), counts)
    first = begins[seq] + (np.arange(num_splits) - starts[seq]) * sizes[seq]
    out[:num_splits, 0] = seq
    out[:num_splits, 1] = first
    out[:num_splits, 2] = np.minimum(first + sizes[seq], lens[seq])
