import pytest

from jaxengine.buckets import Bucket, buckets_for, smallest_bucket
from jaxengine.config import EngineConfig


@pytest.mark.parametrize(
    ("changes", "decode_sizes", "mixed_sizes"),
    [
        ({}, [8, 16, 32, 64], [(32, 32), (64, 64), (128, 64), (256, 64), (512, 64)]),
        ({"max_num_seqs": 1}, [8], [(32, 8), (64, 8), (128, 8), (256, 8), (512, 8)]),
        (
            {"max_num_seqs": 65},
            [8, 16, 32, 64, 128],
            [(32, 32), (64, 64), (128, 128), (256, 128), (512, 128)],
        ),
        ({"max_num_seqs": 3, "max_num_batched_tokens": 3}, [8], [(8, 8)]),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 100}, [8], [(32, 8), (64, 8), (100, 8)]),
        ({"max_num_seqs": 8, "token_buckets": (64, 512)}, [8], [(64, 8), (512, 8)]),
        ({"max_num_seqs": 8, "token_buckets": (2, 4, 512)}, [8], [(8, 8), (512, 8)]),
        (
            {"max_num_seqs": 8, "target_itl_s": 0.05},
            [8],
            [(32, 8), (64, 8), (96, 8), (128, 8), (192, 8), (256, 8), (384, 8), (512, 8)],
        ),
        (
            {"max_num_seqs": 8, "max_num_batched_tokens": 1500},
            [8],
            [(32, 8), (64, 8), (128, 8), (256, 8), (512, 8), (1024, 8), (1500, 8)],
        ),
    ],
)
def test_buckets_follow_from_the_budgets(changes, decode_sizes, mixed_sizes):
    config = EngineConfig(**changes)
    assert buckets_for(config) == [
        *(Bucket(size, size, True) for size in decode_sizes),
        *(Bucket(tokens, seqs, False) for tokens, seqs in mixed_sizes),
    ]


def test_a_ragged_kernel_needs_no_decode_only_steps_and_has_sizes_between_for_them():
    config = EngineConfig(attention_kernel="native")
    assert buckets_for(config) == [
        Bucket(tokens, min(tokens, 64), False)
        for tokens in (16, 32, 64, 96, 128, 192, 256, 384, 512)
    ]
    config = EngineConfig(attention_kernel="native", max_num_seqs=3, max_num_batched_tokens=40)
    assert buckets_for(config) == [Bucket(tokens, 16, False) for tokens in (16, 32, 40)]
    config = EngineConfig(attention_kernel="native", max_num_seqs=20, token_buckets=(64, 512))
    assert buckets_for(config) == [
        Bucket(tokens, min(tokens, 32), False) for tokens in (16, 32, 64, 512)
    ]


def test_there_are_no_sizes_between_where_padding_is_not_computed():
    for target_itl_s in (None, 0.05):
        config = EngineConfig(attention_kernel="native", target_itl_s=target_itl_s)
        assert buckets_for(config, skips_padding=True) == [
            Bucket(tokens, min(tokens, 64), False) for tokens in (16, 32, 64, 128, 256, 512)
        ]


def test_every_step_that_the_budgets_allow_has_a_bucket():
    for max_num_seqs in (1, 7, 8, 9, 20, 64):
        for max_num_batched_tokens in (max_num_seqs, 100, 512):
            if max_num_batched_tokens >= max_num_seqs:
                config = EngineConfig(
                    max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
                )
                buckets = buckets_for(config)
                assert any(b.decode_only and b.num_seqs >= max_num_seqs for b in buckets)
                assert any(
                    not b.decode_only
                    and b.num_tokens >= max_num_batched_tokens
                    and b.num_seqs >= max_num_seqs
                    for b in buckets
                )


def test_a_step_takes_the_cheapest_bucket_that_holds_it():
    buckets = [Bucket(8, 8, True), Bucket(32, 8, True), Bucket(32, 8, False), Bucket(64, 8, False)]

    def chosen(num_tokens, num_seqs, decode_only):
        return smallest_bucket(
            buckets, num_tokens=num_tokens, num_seqs=num_seqs, decode_only=decode_only
        )

    assert chosen(8, 8, True) == (8, 8, True)
    assert chosen(9, 8, True) == (32, 8, True)
    assert chosen(9, 8, False) == (32, 8, False)
    assert chosen(33, 1, False) == (64, 8, False)
    with pytest.raises(ValueError, match="no bucket holds 65 tokens of 1 sequences"):
        chosen(65, 1, False)
    with pytest.raises(ValueError, match="no bucket holds 9 tokens of 9 sequences"):
        chosen(9, 9, True)
