"""What is kept of a call, and for each thread; test_native_memory tests the two."""

from dataclasses import replace

import pytest

from engine_builder import HF_CONFIG
from jaxengine import scratch_memory
from jaxengine.config import EngineConfig
from jaxengine.device_mesh import open_mesh
from jaxengine.models.config import ModelConfig
from jaxengine.scratch_memory import scratch_bytes

MODEL = ModelConfig.from_hf(HF_CONFIG)
CONFIG = EngineConfig(
    dtype="bfloat16",
    attention_kernel="native",
    max_model_len=256,
    max_num_batched_tokens=256,
    max_num_seqs=16,
    num_blocks=200,
)

# Of attention, with heads of 16 padded to 32.
WORKER = 14 * 4096


@pytest.fixture(autouse=True)
def _five_threads(monkeypatch):
    monkeypatch.setattr(scratch_memory, "num_device_threads", lambda: 5)


def scratch(*, packed=True, **changes):
    return scratch_bytes(MODEL, replace(CONFIG, **changes), open_mesh(1), packed=packed)


def test_a_call_of_the_largest_step_is_kept_once():
    # 256 tokens: rows 256 * 64 * 2 = 32,768, qkv 256 * 128 * 4 = 131,072, attended 32,768; rows
    # 32,768 and gated 256 * 96 * 2 = 49,152. Together 278,528, 68 pages.
    assert scratch() == 68 * 4096 + 5 * WORKER
    # 1000 tokens are a size of their own: 128,000 + 512,000 + 128,000, and 128,000 + 192,000.
    # Together 1,088,000, 266 pages.
    assert scratch(max_num_batched_tokens=1000) == 266 * 4096 + 5 * WORKER


def test_weights_of_eight_bits_are_told_apart():
    # Rows 16,384 + 2048 = 18,432, qkv 131,072, attended 18,432 and 65,536 in f32; rows 18,432,
    # gated 24,576 + 2048 = 26,624 and 98,304 in f32: 92 pages.
    assert scratch(quantization="int8") == 92 * 4096 + 5 * WORKER


def test_without_packed_weights_only_attention_keeps_memory():
    assert scratch(packed=False) == 5 * WORKER
