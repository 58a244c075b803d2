"""Model configuration under Hugging Face's keys, checked and with its gaps filled.

Every checkpoint, GGUF or safetensors, is described by the same dictionary, so that the decoder
knows one vocabulary. Keys that are always there: model_type, vocab_size, hidden_size,
intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim,
rms_norm_eps, rope_theta, rope_scaling (None or a dict with "rope_type"), max_position_embeddings,
tie_word_embeddings, bos_token_id (int or None), eos_token_id (list of ints). Other keys of a
config.json are passed through.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from jaxengine.errors import ModelError

__all__ = ["load_hf_config", "normalise_hf_config", "read_json_object"]

REQUIRED_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
# What the Llama, Mistral and Qwen configuration classes of transformers assume for absent keys.
DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "max_position_embeddings": 2048,
}
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {"gemma2": {"tie_word_embeddings": True}}
MAX_SIZE = 1 << 31


def load_hf_config(directory: Path) -> dict[str, Any]:
    """Read config.json, with the end tokens of generation_config.json where it names any.

    Raises:
        ModelError: no config.json, or one that does not describe a decoder.
    """
    path = directory / "config.json"
    config = read_json_object(path)
    generation_path = directory / "generation_config.json"
    if generation_path.exists():
        # Chat models list every token that ends a turn here, and often only one in config.json.
        generation = read_json_object(generation_path)
        if generation.get("eos_token_id") is not None:
            config["eos_token_id"] = generation["eos_token_id"]
    return normalise_hf_config(config, str(path))


def normalise_hf_config(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Fill in defaults, and bring newer spellings to the common one; `source` names the file.

    Raises:
        ModelError: a key is missing or makes no sense.
    """
    family = FAMILY_DEFAULTS.get(str(config.get("model_type")), {})
    full = DEFAULTS | family | {key: value for key, value in config.items() if value is not None}
    _unpack_rope_parameters(full, source)
    if not isinstance(full.get("model_type"), str):
        raise ModelError(f"{source} names no model_type")
    heads = full.get("num_attention_heads")
    full.setdefault("num_key_value_heads", heads)
    hidden = full.get("hidden_size")
    if "head_dim" not in full and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        full["head_dim"] = hidden // heads
    for key in REQUIRED_SIZES:
        value = full.get(key)
        if type(value) is not int or not 1 <= value < MAX_SIZE:
            raise ModelError(f"{source}: {key} must be a positive integer, got {value!r:.80}")
    for key in ("rms_norm_eps", "rope_theta"):
        value = full[key]
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise ModelError(f"{source}: {key} must be a positive number, got {value!r:.80}")
        full[key] = float(value)
    if not isinstance(full["tie_word_embeddings"], bool):
        raise ModelError(f"{source}: tie_word_embeddings must be true or false")
    full["bos_token_id"] = next(iter(_token_ids(full, "bos_token_id", source)), None)
    full["eos_token_id"] = _token_ids(full, "eos_token_id", source)
    return full


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ModelError: the file cannot be read, or holds something else.
    """
    try:
        value = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def _unpack_rope_parameters(config: dict[str, Any], source: str) -> None:
    """Turn transformers 5's rope_parameters, and the old "type" key, into theta and scaling."""
    scaling = config.pop("rope_parameters", config.get("rope_scaling"))
    if scaling is not None:
        if not isinstance(scaling, dict):
            raise ModelError(f"{source}: the rope settings must be an object")
        scaling = dict(scaling)
        config["rope_theta"] = scaling.pop("rope_theta", config["rope_theta"])
        old_name = scaling.pop("type", None)
        scaling["rope_type"] = scaling.get("rope_type") or old_name or "default"
        if scaling["rope_type"] == "default":
            scaling = None
    config["rope_scaling"] = scaling


def _token_ids(config: Mapping[str, Any], key: str, source: str) -> list[int]:
    """A token id, a list of them, or nothing, as a list of ids within the vocabulary."""
    value = config[key]
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < config["vocab_size"]:
            raise ModelError(f"{source}: {key} holds {token_id!r:.80}, which is no token id")
    return ids
