import json

import pytest

from jaxengine.errors import ModelError
from jaxengine.weights.hf_config import load_hf_config, normalise_hf_config, read_json_object

MINIMAL = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def normalised(**changes):
    return normalise_hf_config(MINIMAL | changes, "config.json")


def test_absent_keys_get_the_defaults_of_transformers():
    config = normalised(head_dim=None)
    assert config["num_key_value_heads"] == 4
    assert config["head_dim"] == 16
    assert config["rope_theta"] == 10_000.0
    assert config["rope_scaling"] is None
    assert config["rms_norm_eps"] == 1e-6
    assert config["tie_word_embeddings"] is False
    assert config["bos_token_id"] is None
    assert config["eos_token_id"] == []


def test_rope_settings_of_every_age_are_understood():
    old = normalised(rope_theta=500.0, rope_scaling=LLAMA3)
    older = normalised(
        rope_theta=500.0, rope_scaling={**LLAMA3, "rope_type": None, "type": "llama3"}
    )
    new = normalised(rope_parameters={**LLAMA3, "rope_theta": 500.0})
    for config in (old, new):
        assert config["rope_theta"] == 500.0
        assert config["rope_scaling"] == LLAMA3
        assert "rope_parameters" not in config
    assert older["rope_scaling"] == LLAMA3
    plain = normalised(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    assert plain["rope_theta"] == 500.0
    assert plain["rope_scaling"] is None


def test_other_keys_are_passed_through():
    assert normalised(sliding_window=128)["sliding_window"] == 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, "names no model_type"),
        ({"vocab_size": None}, "vocab_size must be a positive integer, got None"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a positive integer"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer"),
        ({"hidden_size": 2**31}, "hidden_size must be a positive integer"),
        ({"rope_theta": float("inf")}, "rope_theta must be a positive number, got inf"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number, got nan"),
        ({"rope_scaling": "llama3"}, "rope settings must be an object"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": [2, 100]}, "eos_token_id holds 100"),
        ({"bos_token_id": -1}, "bos_token_id holds -1"),
    ],
)
def test_senseless_values_are_refused_by_name(changes, message):
    with pytest.raises(ModelError, match=message):
        normalised(**changes)


def test_end_tokens_of_the_generation_config_win(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MINIMAL | {"eos_token_id": 1}))
    assert load_hf_config(tmp_path)["eos_token_id"] == [1]
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert load_hf_config(tmp_path)["eos_token_id"] == [1]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert load_hf_config(tmp_path)["eos_token_id"] == [2, 3]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "is not valid JSON"), (b"[]", "must hold a JSON object"), (None, "cannot read")],
)
def test_a_file_that_holds_no_object_is_refused(tmp_path, content, message):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_json_object(path)
