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


QWEN = {"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True}
GEMMA2 = {
    "model_type": "gemma2",
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 64,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 128,
    "num_hidden_layers": 5,
}
KINDS = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 128}, (128, 128)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None)),
        ({"model_type": "mistral", "sliding_window": 512}, (None, None)),  # it is never full
        ({"sliding_window": 128}, (None, None)),
        ({**QWEN, "use_sliding_window": False}, (None, None)),
        (QWEN, (None, None)),  # transformers begins with layer 28
        ({**QWEN, "max_window_layers": 1}, (None, 128)),
        ({**QWEN, "max_window_layers": 2}, (None, None)),
        ({**QWEN, "model_type": "qwen3", "max_window_layers": 0}, (128, 128)),
        ({**QWEN, "max_window_layers": 9, "layer_types": KINDS[::-1]}, (128, None)),
        (GEMMA2, (128, None, 128, None, 128)),
        ({**GEMMA2, "num_hidden_layers": 2, "layer_types": KINDS}, (None, 128)),
    ],
    ids=str,
)
def test_layers_have_the_windows_of_their_family(changes, windows):
    config = read(**changes)
    assert config.windows == windows
    assert config.max_position_embeddings == 512
    assert config.sliding_window == max((w for w in windows if w), default=None)


def test_gemma_2_has_scalars_of_its_own():
    config = read(**GEMMA2)
    assert config.attention_scale == 0.125
    assert (config.attention_soft_cap, config.logit_soft_cap) == (50.0, 30.0)
    assert config.tie_embeddings
    assert read(**{**GEMMA2, "attn_logit_softcapping": None}).attention_soft_cap is None
    other = read()
    assert (other.attention_scale, other.attention_soft_cap) == (0.25, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported are llama, "),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only 'silu'"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({**GEMMA2, "use_bidirectional_attention": True}, "use_bidirectional_attention is not"),
        ({**GEMMA2, "hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        ({**GEMMA2, "final_logit_softcapping": -1}, "logit_soft_cap=-1.0 is out of range"),
        ({**GEMMA2, "sliding_window": 0}, "sliding_window=0 must be at least 1"),
        ({**GEMMA2, "layer_types": KINDS}, "layer_types ['full_attention', 'sliding_attention"),
        ({**GEMMA2, "layer_types": ["chunked"] * 5}, "layer_types ['chunked', "),
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
