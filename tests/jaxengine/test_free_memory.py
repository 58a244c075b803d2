"""The KV cache of a device with memory of its own, which the CPU here is said to have."""

from dataclasses import replace

import jax
import pytest

from compile_cache import use_compile_cache
from engine_builder import RandomCheckpoint
from jaxengine import build, free_memory
from jaxengine.build import build_engine
from jaxengine.config import EngineConfig
from jaxengine.engine_options import EngineOptions
from jaxengine.errors import ModelError
from jaxengine.free_memory import free_bytes
from kernels_pallas.ragged_paged_attention import new_kv_cache

MIB = 1 << 20
# Of 16 tokens in one layer: K and V of 2 heads padded to 64 elements, in f32.
BLOCK_BYTES = 2 * 2 * 16 * 64 * 4

OPTIONS = EngineOptions(
    dtype="float32",
    max_num_seqs=8,
    max_num_batched_tokens=32,
    block_size=16,
    attention_kernel="reference",
)


class Device:
    process_index = 0

    def __init__(self, **stats):
        self._stats = stats

    def memory_stats(self):
        return self._stats or None


def test_what_is_free_is_what_the_fullest_device_has():
    devices = [Device(bytes_limit=100, bytes_in_use=30), Device(bytes_limit=100, bytes_in_use=45)]
    assert free_bytes(devices) == 55


def test_devices_that_share_the_memory_of_the_machine_tell_nothing():
    assert free_bytes([Device()]) is None
    assert free_bytes([Device(bytes_in_use=30)]) is None
    assert free_bytes(jax.devices()) is None


@pytest.fixture
def device(monkeypatch):
    """Say how much is free: a list of one number."""
    use_compile_cache()
    free = [40 * MIB]
    monkeypatch.setattr(build, "free_bytes", lambda devices: free[0])
    return free


def built(**changes):
    checkpoint = RandomCheckpoint(num_hidden_layers=1)
    return build_engine(checkpoint, replace(OPTIONS, **changes), memory_bytes=1 << 30)


def test_a_device_of_its_own_is_filled_but_for_what_steps_take(device):
    engine = built()
    memory = engine.memory
    # 5 % are kept, and two steps may hold their memory at a time.
    assert memory.workspace > 0
    assert memory.kv_cache <= 0.95 * 40 * MIB - memory.workspace
    assert memory.kv_cache > 0.95 * 40 * MIB - 2 * memory.workspace - BLOCK_BYTES
    assert memory.kv_cache == engine.config.num_blocks * BLOCK_BYTES
    # Every one of eight requests can have the whole context, which 32 blocks hold.
    assert engine.config.max_model_len == 512


class Planned(Exception):
    """The engine is not built any further."""


@pytest.fixture
def planned(device, monkeypatch):
    """Return the configuration that an engine would have, where steps take 100,000 bytes."""

    def stop(decoder, shard, config, **_):
        raise Planned(config)

    monkeypatch.setattr(free_memory, "_largest_workspace", lambda *_: 100_000)
    monkeypatch.setattr(build, "JaxModelRunner", stop)

    def plan(**changes):
        with pytest.raises(Planned) as caught:
            built(**changes)
        return caught.value.args[0]

    return plan


def test_a_model_whose_context_does_not_fit_gets_less_of_it(device, planned):
    device[0] = 640_000
    config = planned()
    # 95 % of it, without 200,000, are 24.9 blocks; one is reserved.
    assert (config.num_blocks, config.max_model_len) == (24, 23 * 16)


def test_no_room_for_a_block_is_said_with_the_numbers(device, planned):
    device[0] = 200_000
    with pytest.raises(ModelError, match=r"leave 200000 bytes of the device's memory free; steps"):
        built()


def test_who_says_how_large_the_cache_is_gets_that(planned):
    assert planned(num_kv_blocks=20).num_blocks == 21


def test_a_size_that_the_kernel_cannot_address_becomes_half_of_it(monkeypatch):
    """The Triton kernel, and eight-bit caches between 2 and 4 GiB."""
    monkeypatch.setattr(free_memory, "_largest_workspace", lambda *_: 0)

    def new_state(model, config):
        return new_kv_cache(
            num_layers=1,
            num_blocks=config.num_blocks,
            block_size=16,
            num_kv_heads=8,
            head_dim=128,
            dtype="int8",
            kernel="triton",
        )

    monkeypatch.setattr(free_memory, "new_device_state", new_state)
    block_bytes = 2 * 8 * 16 * 128

    def fitting(size):
        config = EngineConfig(num_blocks=2, max_model_len=16)
        return free_memory.fitting_blocks(
            None, None, config, None, free=int(size / 0.95), block_bytes=block_bytes
        )

    assert fitting(2 << 30) in (65535, 65536)
    assert fitting(3 << 30) in (49151, 49152)
    assert fitting(5 << 30) in (163839, 163840)
