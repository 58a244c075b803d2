import numpy as np
import pytest

from kernels_pallas.work_plan import QUERY_TILE, max_prefill_tiles, plan_prefill_tiles


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
