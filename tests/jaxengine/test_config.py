import dataclasses
import math

import pytest

from jaxengine.config import EngineConfig


def test_the_defaults_are_consistent():
    config = EngineConfig()
    assert config.kv_capacity_tokens == 1023 * 16
    assert config.max_blocks_per_seq == 2048 // 16
    assert config.watermark_blocks == 11  # 1 % of 1023, rounded up
    assert config.scheduled_tokens_limit == 512


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().block_size = 32  # type: ignore[misc]


def test_block_tables_have_room_for_a_block_that_is_not_full():
    assert EngineConfig(max_model_len=33, block_size=16).max_blocks_per_seq == 3


def test_no_watermark_is_no_block():
    assert EngineConfig(watermark=0).watermark_blocks == 0


def test_any_watermark_is_at_least_a_block():
    config = EngineConfig(watermark=0.01, num_blocks=5, max_model_len=64)
    assert config.watermark_blocks == 1


def test_the_scheduler_may_be_given_less_than_a_step_holds():
    config = EngineConfig(max_num_batched_tokens=512, max_num_scheduled_tokens=64)
    assert config.scheduled_tokens_limit == 64


def test_a_model_length_that_just_fits_the_cache_is_accepted():
    config = EngineConfig(num_blocks=5, block_size=16, max_model_len=64)
    assert config.kv_capacity_tokens == 64


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"max_model_len": 0}, "max_model_len must be at least 1, got 0"),
        ({"max_num_batched_tokens": -5}, "max_num_batched_tokens must be at least 1, got -5"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
        ({"num_blocks": 1, "max_model_len": 1}, "num_blocks must be at least 2: block 0 is"),
        ({"max_num_queued_requests": -1}, "max_num_queued_requests must be at least 0, got -1"),
        ({"block_size": 12}, "block_size must be 8, 16, 32, 64 or 128, got 12"),
        ({"block_size": 4}, "block_size must be 8, 16, 32, 64 or 128, got 4"),
        ({"block_size": 256}, "block_size must be 8, 16, 32, 64 or 128, got 256"),
        ({"watermark": -0.1}, "watermark must not be negative, got -0.1"),
        ({"watermark": 1023}, r"watermark \(1023\) leaves none of 1023 blocks"),
        ({"watermark": math.nan}, "watermark must not be negative, got nan"),
        ({"max_num_seqs": 1000}, r"max_num_seqs \(1000\) must not exceed .* \(512\)"),
        (
            {"num_blocks": 5, "max_model_len": 65},
            r"max_model_len \(65\) exceeds the KV capacity \(64 tokens\)",
        ),
        (
            {"max_num_scheduled_tokens": 0},
            r"max_num_scheduled_tokens must be in \[1, 512\], got 0",
        ),
        (
            {"max_num_scheduled_tokens": 513},
            r"max_num_scheduled_tokens must be in \[1, 512\], got 513",
        ),
        ({"token_buckets": (128, 64, 512)}, "token_buckets must ascend from at least 1"),
        ({"token_buckets": (64, 64, 512)}, "token_buckets must ascend"),
        (
            {"token_buckets": (64, 128)},
            r"and end at max_num_batched_tokens \(512\), got \(64, 128\)",
        ),
        ({"token_buckets": (0, 512)}, "token_buckets must ascend from at least 1"),
    ],
)
def test_what_cannot_work_is_refused_by_name(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        EngineConfig(**change)


def test_buckets_that_ascend_to_the_largest_step_are_accepted():
    assert EngineConfig(token_buckets=(64, 512)).token_buckets == (64, 512)
