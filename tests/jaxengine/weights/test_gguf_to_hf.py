import math
import struct

import numpy as np
import pytest

from gguf_bytes import F32, STRING, U32, entry, small_llama
from golden_model import TINY_GGUF_ARCHITECTURES, tiny_gguf_files, tiny_model_files
from jaxengine.errors import ModelError
from jaxengine.weights.gguf import GGUFFile
from jaxengine.weights.gguf_to_hf import gguf_hf_config, gguf_tensor_map, restore_rotary_rows
from jaxengine.weights.hf_config import load_hf_config


def read(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content.build())
    return GGUFFile(path)


def replaced(content, key, *fields):
    """`content` with the metadata entry of a key replaced, or removed when no fields are given."""
    prefix = struct.pack("<Q", len(key)) + key.encode()
    kept = [raw for raw in content.entries if not raw.startswith(prefix)]
    content.entries = [*kept, entry(key, *fields)] if fields else kept
    return content


@pytest.mark.parametrize("architecture", TINY_GGUF_ARCHITECTURES)
def test_the_configuration_equals_that_of_the_same_model_as_safetensors(architecture):
    expected = load_hf_config(tiny_model_files(architecture).path)
    config = gguf_hf_config(GGUFFile(tiny_gguf_files(architecture).path))
    for key in (
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rope_theta",
        "rope_scaling",
        "max_position_embeddings",
        "tie_word_embeddings",
        "bos_token_id",
    ):
        assert config[key] == expected[key], key
    # float32 in one file, decimal in the other.
    assert math.isclose(config["rms_norm_eps"], expected["rms_norm_eps"], rel_tol=1e-6)
    # generation_config.json of the directory adds <|endoftext|>; GGUF has no place for it.
    assert config["eos_token_id"] == [257]
    assert expected["eos_token_id"] == [257, 258]


def test_every_end_token_of_the_metadata_counts(tmp_path):
    assert gguf_hf_config(read(tmp_path, small_llama()))["eos_token_id"] == [1, 2]


def test_rows_of_a_head_go_back_to_two_halves():
    # One head of size 6, stored as pairs (0, 3), (1, 4), (2, 5) of its elements; then a second.
    stored = np.array([0, 3, 1, 4, 2, 5, 10, 13, 11, 14, 12, 15])
    restored = restore_rotary_rows(stored[:, None], num_heads=2)[:, 0]
    assert restored.tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]
    assert restore_rotary_rows(stored, num_heads=2).tolist() == restored.tolist()


def test_rows_that_do_not_divide_into_heads_are_refused():
    with pytest.raises(ModelError, match=r"10 rows .* 3 heads"):
        restore_rotary_rows(np.zeros((10, 4)), num_heads=3)


def test_llama3_scaling_is_recognised_by_its_divisors(tmp_path):
    # Llama 3.1: theta 500000, head size 128, factor 8. By hand from the published rule.
    divisors = []
    for i in range(64):
        wavelength = 2 * math.pi * 500_000 ** (2 * i / 128)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(8.0)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / 8 + smooth))
    assert sum(1 < divisor < 8 for divisor in divisors) > 3
    content = small_llama()
    content.entries += [
        entry("llama.attention.key_length", U32, 128),
        entry("llama.rope.freq_base", F32, 500_000.0),
    ]
    content.add_f32("rope_freqs.weight", np.array(divisors))
    file = read(tmp_path, content)
    assert gguf_hf_config(file)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert not any("rope" in name for name in gguf_tensor_map(file))


@pytest.mark.parametrize(
    "divisors", [[1, 3, 2, 1], [0, 0, 0, 0], [math.nan] * 4, [1, 8], [math.inf] * 4]
)
def test_unknown_rotary_divisors_are_refused(tmp_path, divisors):
    content = small_llama()
    content.entries.append(entry("llama.attention.key_length", U32, 8))
    content.add_f32("rope_freqs.weight", np.array(divisors))
    with pytest.raises(ModelError, match="unknown way"):
        gguf_hf_config(read(tmp_path, content))


def test_another_scaling_is_passed_on_for_the_decoder_to_judge(tmp_path):
    content = small_llama()
    content.entries += [
        entry("llama.rope.scaling.type", STRING, "yarn"),
        entry("llama.rope.scaling.factor", F32, 4.0),
        entry("llama.rope.scaling.original_context_length", U32, 16),
    ]
    assert gguf_hf_config(read(tmp_path, content))["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }


@pytest.mark.parametrize(
    ("key", "fields", "message"),
    [
        ("general.architecture", (STRING, "gemma3"), "'gemma3'; supported are llama, qwen2, qwen3"),
        ("general.architecture", (U32, 3), "architecture 3"),
        ("general.architecture", (), "architecture None"),
        ("llama.expert_count", (U32, 8), "mixture of experts"),
        ("llama.block_count", (), "lacks the metadata llama.block_count"),
        ("llama.block_count", (U32, 0), "num_hidden_layers must be a positive integer, got 0"),
        ("llama.block_count", (STRING, "1"), "num_hidden_layers must be a positive integer"),
        ("llama.attention.head_count", (F32, 2.0), "num_attention_heads must be"),
        ("llama.embedding_length", (U32, 9), r"token_embd.weight has the shape \[12, 8\]"),
        ("llama.rope.dimension_count", (U32, 2), "rotates only 2 of 4"),
        ("llama.rope.freq_base", (F32, -1.0), "rope_theta must be a positive number"),
        ("tokenizer.ggml.eos_token_id", (U32, 12), "eos_token_id holds 12"),
    ],
)
def test_a_model_that_cannot_be_run_is_refused(tmp_path, key, fields, message):
    with pytest.raises(ModelError, match=message):
        gguf_hf_config(read(tmp_path, replaced(small_llama(), key, *fields)))


def test_a_tensor_of_unknown_meaning_is_refused(tmp_path):
    content = small_llama()
    content.add_f32("blk.0.attn_sinks.weight", np.zeros(2))
    with pytest.raises(ModelError, match=r"'blk\.0\.attn_sinks\.weight', which is not supported"):
        gguf_tensor_map(read(tmp_path, content))
