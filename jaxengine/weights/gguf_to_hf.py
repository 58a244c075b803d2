"""GGUF metadata and tensors of the llama, qwen2 and qwen3 architectures under Hugging Face names.

llama.cpp rotates neighbouring elements (2i, 2i+1) of a head, Hugging Face elements i and
i + head_dim/2. The converter therefore reorders the q and k rows of llama models (Mistral among
them), and this module puts them back. Qwen's are stored as they are.
"""

import math
import re
from typing import Any

import numpy as np

from jaxengine.errors import ModelError
from jaxengine.weights.gguf import GGUFFile
from jaxengine.weights.hf_config import normalise_hf_config

__all__ = ["gguf_hf_config", "gguf_tensor_map", "restore_rotary_rows"]

ARCHITECTURES = ("llama", "qwen2", "qwen3")
EMBEDDING = "token_embd.weight"
TOP_NAMES = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_PATTERN = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")
# Divisors of the rotary frequencies; they are described by rope_scaling, and are no weight.
ROPE_FREQS = "rope_freqs.weight"
# What every Llama 3.1 to 3.3 model uses; GGUF keeps only the divisors that follow from it.
LLAMA3_LOW_FREQ, LLAMA3_HIGH_FREQ, LLAMA3_ORIGINAL_POSITIONS = 1.0, 4.0, 8192
# (metadata key after the architecture, Hugging Face key, must it be there)
METADATA_KEYS = (
    ("embedding_length", "hidden_size", True),
    ("feed_forward_length", "intermediate_size", True),
    ("block_count", "num_hidden_layers", True),
    ("attention.head_count", "num_attention_heads", True),
    ("attention.head_count_kv", "num_key_value_heads", False),
    ("attention.key_length", "head_dim", False),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps", True),
    ("rope.freq_base", "rope_theta", False),
    ("context_length", "max_position_embeddings", True),
    ("attention.sliding_window", "sliding_window", False),
)


def gguf_hf_config(file: GGUFFile) -> dict[str, Any]:
    """The model's configuration as a normalised Hugging Face dictionary.

    Raises:
        ModelError: an architecture or feature that headrace cannot run, or missing metadata.
    """
    metadata = file.metadata
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{file.path} has the architecture {arch!r:.80}; supported are {known}")
    if metadata.get(f"{arch}.expert_count", 0):
        raise ModelError(f"{file.path} is a mixture of experts, which is not supported")
    shape = file.tensor_shape(EMBEDDING)
    config: dict[str, Any] = {
        "model_type": arch,
        "vocab_size": shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensor_names,
        "attention_bias": "blk.0.attn_q.bias" in file.tensor_names,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [
            metadata[key]
            for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
            if key in metadata
        ],
    }
    for suffix, key, required in METADATA_KEYS:
        value = metadata.get(f"{arch}.{suffix}")
        if value is None and required:
            raise ModelError(f"{file.path} lacks the metadata {arch}.{suffix}")
        config[key] = value
    if len(shape) != 2 or shape[1] != config["hidden_size"]:
        raise ModelError(f"{file.path}: {EMBEDDING} has the shape {list(shape)}")
    config = normalise_hf_config(config, str(file.path))
    rope_dims = metadata.get(f"{arch}.rope.dimension_count", config["head_dim"])
    if rope_dims != config["head_dim"]:
        raise ModelError(f"{file.path} rotates only {rope_dims} of {config['head_dim']} dimensions")
    config["rope_scaling"] = _rope_scaling(file, arch, config)
    return config


def gguf_tensor_map(file: GGUFFile) -> dict[str, str]:
    """Hugging Face tensor name to GGUF tensor name, for every tensor of the file.

    Raises:
        ModelError: a tensor whose part in the computation is unknown.
    """
    names: dict[str, str] = {}
    for gguf_name in file.tensor_names:
        if gguf_name == ROPE_FREQS:
            continue
        match = LAYER_PATTERN.fullmatch(gguf_name)
        if gguf_name in TOP_NAMES:
            names[TOP_NAMES[gguf_name]] = gguf_name
        elif match and match[2] in LAYER_NAMES:
            names[f"model.layers.{int(match[1])}.{LAYER_NAMES[match[2]]}.{match[3]}"] = gguf_name
        else:
            raise ModelError(
                f"{file.path} has the tensor {gguf_name!r:.80}, which is not supported"
            )
    return names


def restore_rotary_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Bring the rows of a llama q or k weight or bias, [num_heads * head_dim, ...], back in order.

    Row 2i of a head becomes row i of its first half, row 2i+1 row i of its second half.

    Raises:
        ModelError: the rows do not divide into heads of even size.
    """
    rows = weight.shape[0]
    if rows % (2 * num_heads):
        raise ModelError(f"{rows} rows of a q or k weight do not divide into {num_heads} heads")
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _rope_scaling(file: GGUFFile, arch: str, config: dict[str, Any]) -> dict[str, Any] | None:
    """The rope_scaling entry, or None where positions are not scaled."""
    kind = file.metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind != "none":
        return {
            "rope_type": kind,
            "factor": file.metadata.get(f"{arch}.rope.scaling.factor"),
            "original_max_position_embeddings": file.metadata.get(
                f"{arch}.rope.scaling.original_context_length"
            ),
        }
    if ROPE_FREQS not in file.tensor_names:
        return None
    divisors = file.tensor(ROPE_FREQS)
    # Where any frequency is scaled, the lowest one is, by the whole factor.
    factor = float(divisors.max())
    if (
        divisors.shape != (config["head_dim"] // 2,)
        or not 1 <= factor < math.inf
        or not np.allclose(divisors, _llama3_divisors(config, factor), rtol=1e-3)
    ):
        raise ModelError(f"{file.path} scales its rotary frequencies in an unknown way")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW_FREQ,
        "high_freq_factor": LLAMA3_HIGH_FREQ,
        "original_max_position_embeddings": LLAMA3_ORIGINAL_POSITIONS,
    }


def _llama3_divisors(config: dict[str, Any], factor: float) -> np.ndarray:
    """What llama3 scaling divides each rotary frequency by, f64[head_dim / 2].

    Waves shorter than original / high are kept, those longer than original / low are slowed by
    `factor`; between, the frequency (not its divisor) is blended linearly in original / wavelength.
    """
    head_dim: int = config["head_dim"]
    theta: float = config["rope_theta"]
    with np.errstate(over="ignore"):
        wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = LLAMA3_ORIGINAL_POSITIONS / wavelengths
    keep = np.clip((turns - LLAMA3_LOW_FREQ) / (LLAMA3_HIGH_FREQ - LLAMA3_LOW_FREQ), 0, 1)
    return 1 / (keep + (1 - keep) / factor)
