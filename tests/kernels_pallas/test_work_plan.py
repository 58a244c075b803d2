from itertools import pairwise

import numpy as np
import pytest

from kernels_pallas.work_plan import (
    QUERY_TILE,
    max_decode_splits,
    max_prefill_tiles,
    plan_decode_splits,
    plan_prefill_tiles,
)


def plan(query_lens, seq_lens):
    starts = np.cumsum([0, *query_lens]).astype(np.int32)
    num_decodes = query_lens.count(1)
    out = np.full((16, 4), -9, np.int32)
    count = plan_prefill_tiles(starts, np.array(seq_lens, np.int32), num_decodes, out)
    assert (out[count:] == -9).all()
    return out[:count].tolist()


def test_decodes_need_no_tiles():
    assert plan([1, 1, 1], [5, 1, 900]) == []


def test_no_sequences_need_no_tiles():
    assert plan([], []) == []


def test_a_short_prompt_is_one_tile():
    assert plan([10], [10]) == [[0, 0, 0, 10]]


def test_a_full_tile_is_one_tile_and_one_more_token_begins_the_next():
    assert QUERY_TILE == 64
    assert plan([64], [64]) == [[0, 0, 0, 64]]
    assert plan([65], [65]) == [[0, 0, 0, 64], [0, 64, 64, 1]]


def test_tiles_follow_the_packed_order_after_the_decodes():
    # Two decodes take tokens 0 and 1. Sequence 2: 130 tokens at positions 70 to 199.
    # Sequence 3: 3 tokens at positions 0 to 2, packed from 2 + 130 = 132.
    assert plan([1, 1, 130, 3], [7, 300, 200, 3]) == [
        [2, 2, 70, 64],
        [2, 66, 134, 64],
        [2, 130, 198, 2],
        [3, 132, 0, 3],
    ]


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "most"),
    [
        (64, 1, 2),  # never needed, but cheap
        (128, 8, 10),
        (8, 8, 8),
        (4, 64, 4),
    ],
)
def test_the_most_tiles_follow_from_the_bucket(num_tokens, num_seqs, most):
    assert max_prefill_tiles(num_tokens, num_seqs) == most


def test_the_most_tiles_suffice_for_the_worst_cut():
    # One token past a whole tile wastes most. 4 sequences of 65 tokens: 8 tiles.
    assert len(plan([65] * 4, [65] * 4)) == 8 <= max_prefill_tiles(260, 4)


def splits(seq_lens, num_decodes=None):
    """Rows of each sequence, as [first position, position after the last]."""
    num_decodes = len(seq_lens) if num_decodes is None else num_decodes
    out = np.full((max_decode_splits(len(seq_lens)), 3), -9, np.int32)
    starts = np.full(len(seq_lens) + 3, -9, np.int32)  # two padding sequences
    plan_decode_splits(np.array(seq_lens, np.int32), num_decodes, out, starts)
    assert (out[starts[-1] :] == -9).all()
    assert (starts[num_decodes:] == starts[-1]).all()
    rows = [out[a:b] for a, b in pairwise(starts)][:num_decodes]
    assert all((own[:, 0] == seq).all() for seq, own in enumerate(rows))
    return [own[:, 1:].tolist() for own in rows]


def test_a_short_context_is_one_split():
    assert splits([1, 512, 3]) == [[[0, 1]], [[0, 512]], [[0, 3]]]


def test_a_long_context_is_cut_at_multiples_of_128():
    # 513 tokens in two: 257 each, rounded up to 384.
    assert splits([513]) == [[[0, 384], [384, 513]]]
    # 4,096 = 8 x 512.
    assert splits([4096]) == [[[i * 512, (i + 1) * 512] for i in range(8)]]


def test_no_context_has_more_than_32_splits_and_together_they_are_all_of_it():
    for length in [16_384, 16_385, 32_768, 100_001, 131_072]:
        (own,) = splits([length])
        assert len(own) <= 32
        assert [first for first, _ in own] == [0, *(end for _, end in own[:-1])]
        assert own[-1][1] == length
        assert all(first < end for first, end in own)


def test_how_a_context_is_split_depends_on_nobody_else():
    lengths = [1, 2000, 700, 40_000, 512]
    assert splits(lengths) == [splits([length])[0] for length in lengths]


def test_only_decodes_are_split():
    assert splits([700, 5, 9000], num_decodes=2) == splits([700, 5])
    assert splits([9000, 4], num_decodes=0) == []
