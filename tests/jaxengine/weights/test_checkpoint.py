import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from golden_model import (
    TINY_FAMILIES,
    TINY_GGUF_ARCHITECTURES,
    default_model_files,
    tiny_gguf_files,
    tiny_model_files,
)
from jaxengine.errors import ModelError
from jaxengine.weights.checkpoint import open_checkpoint


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_directory_gives_its_tensors_under_their_own_names(family):
    files = tiny_model_files(family)
    expected = load_file(files.path / "model.safetensors")
    checkpoint = open_checkpoint(files)
    assert checkpoint.names() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_array_equal(checkpoint.get(name), weight)
    config = json.loads((files.path / "config.json").read_text())
    assert checkpoint.hf_config["hidden_size"] == config["hidden_size"]
    assert checkpoint.hf_config["rope_scaling"] == config.get("rope_scaling")


@pytest.mark.parametrize("architecture", TINY_GGUF_ARCHITECTURES)
def test_a_gguf_file_gives_the_weights_that_it_was_made_of(architecture):
    expected = load_file(tiny_model_files(architecture).path / "model.safetensors")
    checkpoint = open_checkpoint(tiny_gguf_files(architecture))
    assert checkpoint.names() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_array_equal(checkpoint.get(name), weight, err_msg=name)


@pytest.mark.parametrize("files", [tiny_model_files("llama"), tiny_gguf_files("llama")])
def test_an_unknown_name_is_an_error(files):
    with pytest.raises(ModelError, match=r"no tensor .*'lm_head\.weight'"):
        open_checkpoint(files).get("lm_head.weight")


@pytest.mark.model
def test_the_default_model_is_described_as_on_the_hub():
    checkpoint = open_checkpoint(default_model_files())
    config = dict(checkpoint.hf_config)
    # config.json of HuggingFaceTB/SmolLM2-135M-Instruct.
    expected = {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": [2],
    }
    assert {key: config[key] for key in expected} == expected
    assert config["rms_norm_eps"] == pytest.approx(1e-5)
    assert len(checkpoint.names()) == 2 + 30 * 9
    assert checkpoint.get("model.layers.29.mlp.down_proj.weight").shape == (576, 1536)


@pytest.mark.model
def test_the_default_model_is_stored_in_codes():
    checkpoint = open_checkpoint(default_model_files())
    layers = [name for name in checkpoint.names() if name.endswith("_proj.weight")]
    assert len(layers) == 30 * 7
    assert {checkpoint.code_bits(name) for name in layers} == {4}
    assert checkpoint.code_bits("model.embed_tokens.weight") == 8
    assert checkpoint.code_bits("model.norm.weight") is None
    prefix = "model.layers.3."
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"):
        name = f"{prefix}{part}.weight"
        codes = checkpoint.get_codes(name)
        np.testing.assert_array_equal(codes.numbers(), checkpoint.get(name), err_msg=name)


@pytest.mark.parametrize("files", [tiny_model_files("llama"), tiny_gguf_files("llama")])
def test_files_of_wide_weights_have_no_codes(files):
    checkpoint = open_checkpoint(files)
    assert {checkpoint.code_bits(name) for name in checkpoint.names()} == {None}
    with pytest.raises(ModelError, match=r"codes"):
        checkpoint.get_codes("model.layers.0.mlp.down_proj.weight")
