from itertools import pairwise

import numpy as np
import pytest

from kernels_pallas.work_plan import (
    QUERY_TILE,
    AttentionBatch,
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


def splits(seq_lens, num_decodes=None, window=None):
    """Rows of each sequence, as [first position, position after the last]."""
    num_decodes = len(seq_lens) if num_decodes is None else num_decodes
    most = max_decode_splits(len(seq_lens), sliding_window=window)
    out = np.full((most, 3), -9, np.int32)
    starts = np.full(len(seq_lens) + 3, -9, np.int32)  # two padding sequences
    lens = np.array(seq_lens, np.int32)
    plan_decode_splits(lens, num_decodes, out, starts, sliding_window=window)
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


def test_a_context_within_the_window_is_split_as_without_one():
    assert splits([1, 513, 4096], window=4096) == splits([1, 513, 4096])


def test_splits_begin_at_the_last_multiple_of_128_before_the_window():
    # 1,000 - 100 = 900 is the first position seen; 896 = 7 x 128.
    assert splits([1000], window=100) == [[[896, 1000]]]
    assert splits([1000], window=104) == [[[896, 1000]]]
    assert splits([1000], window=105) == [[[768, 1000]]]
    # 1,024 + 1 tokens in three splits of 384.
    assert splits([5001], window=1000) == [[[3968, 4352], [4352, 4736], [4736, 5001]]]


@pytest.mark.parametrize("window", [1, 128, 129, 512, 513, 4096, 100_000])
def test_no_split_lies_wholly_before_the_window_and_their_number_is_bounded(window):
    for length in [1, 127, 4096, 4097, 50_001, 131_072]:
        (own,) = splits([length], window=window)
        first_seen = max(length - window, 0)
        assert own[0][0] % 128 == 0
        assert own[0][0] <= first_seen < own[0][0] + 128
        assert [first for first, _ in own[1:]] == [end for _, end in own[:-1]]
        assert own[-1][1] == length
        assert all(first % 128 == 0 and end > first_seen for first, end in own)
        assert len(own) <= max_decode_splits(1, sliding_window=window) <= 32


def test_a_batch_without_a_plan_for_windows_says_so():
    empty = np.zeros(0)
    batch = AttentionBatch(*[empty] * 9)
    assert batch.splits(None) == (batch.decode_splits, batch.split_starts)
    with pytest.raises(ValueError, match="planned without a sliding window"):
        batch.splits(7)
    planned = batch._replace(window_splits=np.ones((1, 3)), window_split_starts=np.ones(2))
    assert planned.splits(7) == (planned.window_splits, planned.window_split_starts)
