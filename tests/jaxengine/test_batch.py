import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compile_cache import use_compile_cache
from jaxengine.batch import BatchBuilder, pick_token_ids
from jaxengine.batch_layout import BatchLayout
from jaxengine.buckets import Bucket
from jaxengine.request import Request
from jaxengine.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from jaxengine.scheduler_output import ScheduledRequest
from steps import step_of

SPARE_ROW = 9
GREEDY = SamplingParams(max_tokens=8, temperature=0)


def make_builder(*buckets, block_size=4, max_blocks=6, eos=(70, 71), window=None, **options):
    return BatchBuilder(
        [Bucket(*bucket) for bucket in buckets or [(16, 4, False), (4, 4, True)]],
        block_size=block_size,
        max_blocks_per_seq=max_blocks,
        spare_row=SPARE_ROW,
        eos_token_ids=eos,
        sliding_window=window,
        **options,
    )


def item(token_ids, first, count, *, row=0, blocks=(1,), pending=False, prompt=None, **request):
    """One request's share of a step; `prompt` tokens of it are prompt, by default all."""
    params = request.pop("params", GREEDY)
    made = Request("r", tuple(token_ids), params, seed=request.pop("seed", 0), arrival_time_s=0.0)
    made.num_prompt_tokens = len(token_ids) if prompt is None else prompt
    samples = request.pop("samples", first + count == len(token_ids) + pending)
    return ScheduledRequest(made, first, count, row, tuple(blocks), samples, pending)


def build(*items, builder=None):
    layout, packed, sequences, *_ = (builder or make_builder()).build(step_of(*items))
    assert packed.dtype == np.int32
    return layout.bucket, layout.views(packed), sequences


def test_a_mixed_step_is_packed_decodes_first():
    """A prompt chunk, a long and a short decode: the short decode first, the chunk last.

    Block size 4. The chunk holds positions 3 to 7 in blocks 5 and 2: slots 5*4+3, 2*4 .. 2*4+3.
    The long decode is at position 9, the second slot of its third block 7; its token is pending
    in row 1. The short one is at position 4, the first slot of its second block 3.
    """
    bucket, views, sequences = build(
        item(range(10, 22), 3, 5, row=0, blocks=(5, 2, 4)),
        item(range(30, 39), 9, 1, row=1, blocks=(1, 6, 7), pending=True),
        item(range(50, 55), 4, 1, row=2, blocks=(8, 3)),
    )
    assert bucket == (16, 4, False)
    assert sequences == [2, 1, 0]
    assert views["token_ids"].tolist() == [54, -2, 13, 14, 15, 16, 17] + [0] * 9
    assert views["positions"].tolist() == [4, 9, 3, 4, 5, 6, 7] + [0] * 9
    assert views["slot_mapping"].tolist() == [12, 29, 23, 8, 9, 10, 11] + [0] * 9
    assert views["query_start_loc"].tolist() == [0, 1, 2, 7, 7]
    assert views["seq_lens"].tolist() == [5, 10, 8, 0]
    assert views["block_tables"].tolist() == [
        [8, 3, 0, 0, 0, 0],
        [1, 6, 7, 0, 0, 0],
        [5, 2, 4, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    assert views["num_decodes"] == 2
    assert views["num_prefill_tiles"] == 1
    assert views["prefill_tiles"][0].tolist() == [2, 2, 3, 5]
    assert views["decode_splits"][:3].tolist() == [[0, 0, 5], [1, 0, 10], [0, 0, 0]]
    assert views["split_starts"].tolist() == [0, 1, 2, 2, 2]
    # The chunk does not reach its last token: its row must keep what it remembers.
    assert views["rows"].tolist() == [2, 1, SPARE_ROW, SPARE_ROW]
    assert views["sample_indices"].tolist() == [0, 1, 6, 0]
    assert views["position"].tolist() == [5, 10, 8, 0]


def test_fillers_are_computed_like_any_token_and_sample_nothing():
    """The padding of a static batch, and a row that it does not release: 3 tokens, 2 and 1 more.

    The row has 9 tokens in blocks 2 to 4 of size 4: its filler at position 9 goes to slot 4*4+1.
    The padding is at positions 3 and 4, in slot 3 of block 1 and slot 0 of block 5.
    """
    chunk = item(range(10, 18), 0, 3, row=7, blocks=(1, 5))
    ended = item(range(30, 39), 9, 1, row=-1, blocks=(2, 3, 4), samples=False)
    padding = chunk._replace(first_position=3, num_new_tokens=2, row=-1, is_filler=True)
    step = step_of(chunk, padding=(padding,), ended_rows=(ended._replace(is_filler=True),))
    layout, packed, sequences, *_, computed = make_builder().build(step)
    views = layout.views(packed)
    assert sequences == [1]
    assert views["token_ids"][:6].tolist() == [0, 10, 11, 12, 0, 0]
    assert views["positions"][:6].tolist() == [9, 0, 1, 2, 3, 4]
    assert views["slot_mapping"][:6].tolist() == [17, 4, 5, 6, 7, 20]
    assert views["query_start_loc"].tolist() == [0, 1, 4, 6, 6]
    assert views["seq_lens"].tolist() == [10, 3, 5, 0]
    assert views["rows"].tolist() == [SPARE_ROW] * 4
    assert (views["num_decodes"], views["num_slots"], computed) == (1, 6, 16)
    assert make_builder(skips_padding=True).build(step).num_slots == 6


def test_nobody_wants_log_probabilities_of_fillers():
    wish = SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=1)
    row = item(range(10, 18), 3, 2, params=wish, samples=False)
    assert make_builder().build(step_of(row)).prompt_logprobs
    step = step_of(padding=(row._replace(is_filler=True),))
    assert not make_builder().build(step).prompt_logprobs


def test_prefill_chunks_keep_the_order_of_the_scheduler():
    _, views, sequences = build(
        item(range(10, 18), 0, 3, row=4, blocks=(1,)),
        item(range(30, 32), 0, 2, row=5, blocks=(2,)),
    )
    assert sequences == [0, 1]
    assert views["token_ids"][:5].tolist() == [10, 11, 12, 30, 31]


def test_a_chunk_may_end_in_a_pending_token():
    """After a preemption the whole sequence is computed anew, with its last token on the device."""
    _, views, _ = build(item([1, 2, 3], 0, 4, row=6, blocks=(3,), pending=True))
    assert views["token_ids"][:4].tolist() == [1, 2, 3, -7]
    assert views["rows"][0] == 6


@pytest.mark.parametrize(
    ("counts", "bucket"),
    [
        ([1], (4, 4, True)),
        ([1] * 4, (4, 4, True)),
        ([1] * 5, (8, 8, True)),
        ([2], (8, 8, False)),
        ([2, 1, 1], (8, 8, False)),
        ([9], (32, 8, False)),
        ([1] * 7 + [2], (32, 8, False)),
        ([32], (32, 8, False)),
    ],
)
def test_the_smallest_bucket_that_holds_the_step_is_chosen(counts, bucket):
    builder = make_builder((32, 8, False), (8, 8, False), (8, 8, True), (4, 4, True), block_size=8)
    items = [item(range(c), 0, c, blocks=range(1, 7)) for c in counts]
    assert build(*items, builder=builder)[0] == bucket


@pytest.mark.parametrize(("counts", "message"), [([17], "17 tokens of 1"), ([1] * 5 + [2], "of 6")])
def test_a_step_that_no_bucket_holds_is_refused(counts, message):
    with pytest.raises(ValueError, match=message):
        build(*(item(range(c), 0, c, blocks=range(1, 7)) for c in counts))


def test_nothing_but_zeros_and_spare_rows_is_padding():
    _, views, _ = build(item([1, 2], 1, 1))
    for name, values in views.items():
        if name == "rows":
            assert values.tolist() == [0, SPARE_ROW, SPARE_ROW, SPARE_ROW]
        elif name == "suppressed_ids":
            assert (values == -1).all()
        elif values.ndim and name not in ("query_start_loc", "prefill_tiles", "split_starts"):
            assert not values[1:].any(), name


SAMPLED = SamplingParams(max_tokens=9, temperature=0.8, top_k=40, top_p=0.9, min_p=0.05)
WARM = SamplingParams(max_tokens=9, temperature=0.5)


def test_sampling_parameters_travel_as_their_bits():
    layout, packed, *_ = make_builder().build(
        step_of(
            item([1, 2], 0, 2, params=SAMPLED, seed=0x89ABCDEF_01234567),
            item([3], 0, 1, params=GREEDY, blocks=(2,)),
            item([4], 0, 1, params=WARM, seed=7, blocks=(3,)),
        )
    )
    use_compile_cache()
    end = packed[-layout.choice.size :]
    batch = jax.jit(layout.choice.unpack)(end).sampling
    np.testing.assert_array_equal(batch.temperature, np.float32([0, 0.5, 0.8, 0]))
    np.testing.assert_array_equal(batch.top_k, [0, 0, 40, 0])
    np.testing.assert_array_equal(batch.top_p, np.float32([0, 1, 0.9, 0]))
    np.testing.assert_array_equal(batch.min_p, np.float32([0, 0, 0.05, 0]))
    np.testing.assert_array_equal(
        np.asarray(batch.seed).view(np.uint32)[1:3], [[0, 7], [0x89ABCDEF, 0x01234567]]
    )
    np.testing.assert_array_equal(batch.position, [1, 1, 2, 0])
    assert batch.any_random
    assert batch.any_filtered
    assert not batch.any_suppressed


@pytest.mark.parametrize(
    ("changes", "random", "filtered"),
    [
        ({"temperature": 0.0, "top_k": 5}, 0, 0),
        ({"temperature": 1e-6, "top_p": 0.5}, 0, 0),
        ({"temperature": 1.0}, 1, 0),
        ({"temperature": 1.0, "top_k": 5}, 1, 1),
        ({"temperature": 1.0, "top_p": 0.5}, 1, 1),
        ({"temperature": 1.0, "min_p": 0.5}, 1, 1),
    ],
)
def test_what_nobody_asks_for_is_switched_off(changes, random, filtered):
    _, views, _ = build(item([1], 0, 1, params=SamplingParams(max_tokens=1, **changes)))
    assert (views["any_random"], views["any_filtered"]) == (random, filtered)


def test_a_chunk_that_samples_nothing_asks_for_nothing():
    params = SamplingParams(max_tokens=9, min_tokens=3, temperature=1.0, top_k=4)
    _, views, _ = build(item(range(9), 0, 4, params=params))
    assert not views["any_random"]
    assert not views["any_suppressed"]


@pytest.mark.parametrize(
    ("num_sampled", "changes", "expected"),
    [
        (0, {}, [70, 71, 5, 6]),
        (1, {}, [70, 71, 5, 6]),
        (2, {}, []),
        (1, {"ignore_eos": True}, [5, 6]),
        (1, {"min_tokens": 0}, []),
    ],
)
def test_end_and_stop_tokens_are_suppressed_until_min_tokens(num_sampled, changes, expected):
    """Three prompt tokens; with one sampled, the next to sample is the second of min_tokens=2."""
    params = SamplingParams(
        **{"max_tokens": 9, "min_tokens": 2, "stop_token_ids": (5, 6), "temperature": 0} | changes
    )
    token_ids = [1, 2, 3, 4, 4][: 3 + num_sampled]
    _, views, _ = build(
        item(token_ids, len(token_ids) - 1, 1, prompt=3, params=params, blocks=(1, 2))
    )
    width = MAX_STOP_TOKEN_IDS + 2
    assert views["suppressed_ids"][0].tolist() == expected + [-1] * (width - len(expected))
    assert views["any_suppressed"] == bool(expected)


def test_pending_tokens_come_from_the_memory_of_their_row():
    picked = pick_token_ids(jnp.array([7, -1, 0, -3]), jnp.array([100, 101, 102]))
    assert picked.tolist() == [7, 100, 0, 102]


def test_layers_with_a_window_have_a_plan_of_their_own():
    """Position 299 sees from 280 on; 256 is the last multiple of 128 before it."""
    builder = make_builder((4, 4, True), block_size=64, window=20)
    long, short = item(range(300), 299, 1, blocks=range(1, 6)), item(range(5), 4, 1)
    layout, packed, *_ = builder.build(step_of(long, short))
    views = layout.views(packed)
    assert views["decode_splits"][:2].tolist() == [[0, 0, 5], [1, 0, 300]]
    assert views["window_splits"][:2].tolist() == [[0, 0, 5], [1, 256, 300]]
    assert views["window_split_starts"].tolist() == [0, 1, 2, 2, 2]
    attention = layout.unpack(jnp.asarray(packed)).attention
    np.testing.assert_array_equal(attention.splits(20)[0], views["window_splits"])
    assert BatchLayout(layout.bucket, 6, 2).unpack(jnp.asarray(packed)).attention[9:] == (
        None,
        None,
    )


def test_a_step_is_sent_with_its_number():
    step = make_builder().build(step_of(item((1, 2, 3), 0, 3)), serial=5)
    assert (step.layout.views(step.packed)["serial"], step.serial) == (5, 5)
    assert make_builder().build(step_of(item((1, 2, 3), 0, 3))).serial == 0
