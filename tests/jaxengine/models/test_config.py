import dataclasses

import pytest

from engine_builder import HF_CONFIG
from jaxengine.errors import ModelError
from jaxengine.models.config import Llama3RopeScaling, ModelConfig

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(**changes):
    return ModelConfig.from_hf({**HF_CONFIG, **changes})


def test_a_llama_config_is_read_key_by_key():
    config = read()
    assert config == ModelConfig(
        family="llama",
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_embeddings=True,
        eos_token_ids=(299,),
    )
    assert hash(config) == hash(read())


@pytest.mark.parametrize(
    ("family", "qkv_bias", "qk_norm"),
    [
        ("llama", False, False),
        ("mistral", False, False),
        ("qwen2", True, False),
        ("qwen3", False, True),
    ],
)
def test_families_differ_in_biases_and_norms(family, qkv_bias, qk_norm):
    config = read(model_type=family)
    assert (config.qkv_bias, config.qk_norm) == (qkv_bias, qk_norm)


def test_absent_keys_have_the_defaults_of_the_llama_line():
    without = ("num_key_value_heads", "head_dim", "rope_theta", "tie_word_embeddings")
    config = ModelConfig.from_hf({k: v for k, v in HF_CONFIG.items() if k not in without})
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert (config.rope_theta, config.tie_embeddings) == (10000.0, False)


@pytest.mark.parametrize(("eos", "ids"), [(None, ()), (7, (7,)), ([7, 9], (7, 9))])
def test_end_tokens_are_none_one_or_many(eos, ids):
    assert read(eos_token_id=eos).eos_token_ids == ids


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_is_read_under_its_old_and_its_new_name(key):
    config = read(**{key: {**LLAMA3_ROPE, "rope_theta": 500000.0}})
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == Llama3RopeScaling(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ({"model_type": "mistral", "sliding_window": 128}, 128),
        ({"model_type": "mistral", "sliding_window": 4096}, 512),
        ({"model_type": "mistral", "sliding_window": None}, 512),
        ({"model_type": "qwen2", "sliding_window": 128}, 512),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True}, 128),
    ],
)
def test_no_more_context_is_served_than_the_sliding_window(changes, positions):
    assert read(**changes).max_position_embeddings == positions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported are llama, "),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only 'silu'"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"hidden_size": None}, "hidden_size is missing or not a number"),
        ({"vocab_size": "300"}, "vocab_size is missing or not a number"),
        ({"num_hidden_layers": True}, "num_hidden_layers is missing or not a number"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing or not a number"),
        ({"vocab_size": 0}, "vocab_size=0 is out of range"),
        ({"num_hidden_layers": 1 << 25}, "num_layers=33554432 is out of range"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 kv heads"),
        ({"num_key_value_heads": 8}, "4 query heads cannot share 8 kv heads"),
        ({"head_dim": 15}, "head_dim=15 must be even"),
        ({"rope_scaling": {"type": "yarn"}}, "rope scaling 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor is missing or not a number"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(changes, message):
    with pytest.raises(ModelError) as caught:
        read(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_config_without_a_family_is_refused():
    with pytest.raises(ModelError, match="model_type 'None' is not supported"):
        ModelConfig.from_hf({})


def test_the_config_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        read().vocab_size = 1
