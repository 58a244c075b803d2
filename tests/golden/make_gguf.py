"""Write a tiny checkpoint as GGUF with the `gguf` package, laid out as by llama.cpp's converter.

Used by make_golden.py only. Llama's q and k rows are reordered from Hugging Face's half-split
rotary layout to the interleaved one; Qwen's are not.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Row 2i of a head is row i of its first half, row 2i+1 row i of its second half."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, _, layer, suffix = name.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[suffix]}"


def write_gguf(
    path: Path,
    config: dict[str, Any],
    state: dict[str, np.ndarray],
    *,
    tokens: list[str],
    num_special: int,
    chat_template: str,
) -> None:
    """Write `state` (Hugging Face names, [out, in], float32) and the tokenizer to `path`."""
    arch = config["model_type"]
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // num_heads)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(f"tiny-{arch}")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)

    padding = [f"[PAD{index}]" for index in range(len(tokens), config["vocab_size"])]
    num_plain = len(tokens) - num_special
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if arch == "llama" else "qwen2")
    writer.add_token_list([*tokens, *padding])
    writer.add_token_types(
        [gguf.TokenType.NORMAL] * num_plain
        + [gguf.TokenType.CONTROL] * num_special
        + [gguf.TokenType.UNUSED] * len(padding)
    )
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(chat_template)

    for name, weight in state.items():
        if arch == "llama" and name.endswith("q_proj.weight"):
            weight = interleave(weight, num_heads)
        elif arch == "llama" and name.endswith("k_proj.weight"):
            weight = interleave(weight, config["num_key_value_heads"])
        writer.add_tensor(gguf_name(name), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
