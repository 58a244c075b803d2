import pytest

from bench.simulation.device import MODELS, FixedDevice, RooflineDevice
from bench.simulation.engine_sizes import EngineSizes, engine_for


def test_an_accelerator_gets_all_blocks_that_its_memory_holds():
    device = RooflineDevice(model=MODELS["8b"])
    config = engine_for(device, EngineSizes())
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (256, 2048)
    assert config.num_blocks == device.kv_capacity_tokens // config.block_size


def test_another_device_never_runs_out_of_blocks():
    config = engine_for(FixedDevice(), EngineSizes(max_num_seqs=8, max_model_len=100))
    # 7 blocks of 16 for 100 tokens, 8 times, and the reserved one.
    assert config.num_blocks == 57


def test_what_is_given_is_taken():
    sizes = EngineSizes(
        max_model_len=256,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        block_size=32,
        num_blocks=20,
        watermark=2.0,
        batch_window_s=0.5,
        long_prefill_token_threshold=16,
        queue_timeout_s=9.0,
        enable_prefix_caching=False,
        overlap=False,
        attention_kernel="reference",
    )
    config = engine_for(FixedDevice(), sizes)
    for name in EngineSizes.__dataclass_fields__:
        assert getattr(config, name) == getattr(sizes, name), name


def test_sizes_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="max_model_len"):
        engine_for(FixedDevice(), EngineSizes(max_model_len=2048, num_blocks=10))
