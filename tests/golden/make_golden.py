"""Make the golden data of the tiny checkpoints with Hugging Face's own implementation.

Run in an environment with torch, transformers, safetensors and gguf (see README.md beside this
file); it never imports headrace. For each family it writes, under ``tiny/<family>/``, a checkpoint
with random float32 weights, a byte-level tokenizer, and ``golden.npz``:

    prompt_P   i32[T]     token ids of prompt P (0 and 1)
    logits_P   f32[T, V]  logits at every position of the prompt
    greedy_P   i32[24]    greedy continuation, found by recomputing the whole sequence each time
    margins_P  f32[24]    first minus second largest logit at each of those steps

Seeds are searched so that no margin is small and no greedy token ends the text: another correct
float32 implementation must give the same tokens.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_gguf import write_gguf
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

GOLDEN_DIR = Path(__file__).parent
TINY_DIR = GOLDEN_DIR / "tiny"

VOCAB_SIZE = 272  # 256 bytes, 4 special tokens, and 12 ids that no token has
NUM_GREEDY = 24
MIN_MARGIN = 0.05
MAX_SEEDS = 4000
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|pad|>")  # ids 256 to 259
IM_START, IM_END, ENDOFTEXT, PAD = range(256, 260)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PROMPTS = (
    "Hello, world!",
    "<|im_start|>user\nWhat is the capital of France? 日本語 123<|im_end|>\n",
)

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": IM_START,
    "eos_token_id": IM_END,
    "pad_token_id": PAD,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "initializer_range": 0.02,
    "use_cache": True,
}
# Keys as in the config.json files that people have; rope_theta differs so that ignoring it shows.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    "llama3_rope": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 3,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        # Small enough that the tested positions use all three bands of the scaling.
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": False,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    },
    # Windows shorter than the prompts.
    "mistral_window": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "sliding_window": 8,
        "tie_word_embeddings": False,
    },
    "qwen2_window": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    # Caps that scores and logits reach; tied embeddings, which the config does not mention.
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "num_hidden_layers": 3,
        "head_dim": 32,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 8.0,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    },
}
# Their scores are capped by no other implementation of attention in transformers.
EAGER_FAMILIES = ("gemma2",)
GGUF_FAMILIES = ("llama", "qwen2", "qwen3")


def byte_symbols() -> list[str]:
    """The printable character that byte-level BPE writes for each byte value."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def prompt_ids(text: str) -> list[int]:
    """Token ids of `text`: one per byte, special tokens recognised."""
    ids: list[int] = []
    while text:
        for offset, token in enumerate(SPECIAL_TOKENS):
            if text.startswith(token):
                ids.append(256 + offset)
                text = text.removeprefix(token)
                break
        else:
            ids.extend(text[0].encode())
            text = text[1:]
    return ids


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    added = [
        {
            "id": 256 + offset,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for offset, token in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {symbol: byte for byte, symbol in enumerate(byte_symbols())},
            "merges": [],
        },
    }
    write_json(directory / "tokenizer.json", tokenizer)
    write_json(
        directory / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|pad|>",
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 512,
            "tokenizer_class": "GPT2Tokenizer",
        },
    )
    write_json(
        directory / "generation_config.json",
        {"bos_token_id": IM_START, "eos_token_id": [IM_END, ENDOFTEXT], "pad_token_id": PAD},
    )


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter so that each of them matters to the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * noise)
            elif name.startswith("model.embed") and model.config.model_type == "gemma2":
                # It is scaled by 8, and must not drown what the layers add.
                parameter.copy_(0.15 * noise)
            elif name.endswith("bias") or name.startswith("model.embed"):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[1] ** 0.5)


@torch.no_grad()
def greedy(model: torch.nn.Module, ids: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits of the prompt, the greedy tokens, and their margins."""
    tokens = list(ids)
    prompt_logits: np.ndarray | None = None
    margins = []
    for _ in range(NUM_GREEDY):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
        if prompt_logits is None:
            prompt_logits = logits.numpy().copy()
        top = torch.topk(logits[-1], 2)
        margins.append(float(top.values[0] - top.values[1]))
        tokens.append(int(top.indices[0]))
    assert prompt_logits is not None
    return (
        prompt_logits,
        np.array(tokens[len(ids) :], np.int32),
        np.array(margins, np.float32),
    )


def is_clear(runs: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> bool:
    """Whether the answers leave no room for rounding and do not just repeat one token."""
    return all(
        margins.min() > MIN_MARGIN
        and not np.isin(tokens, (IM_END, ENDOFTEXT)).any()
        and len(set(tokens.tolist())) >= NUM_GREEDY // 3
        for _, tokens, margins in runs
    )


def make_family(name: str) -> None:
    """Write one checkpoint and its golden arrays."""
    directory = TINY_DIR / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    write_json(directory / "config.json", COMMON | FAMILIES[name])
    write_tokenizer(directory)
    config = AutoConfig.from_pretrained(directory)
    options = {"dtype": torch.float32}
    if name in EAGER_FAMILIES:
        options["attn_implementation"] = "eager"
    model = AutoModelForCausalLM.from_config(config, **options).eval()
    prompts = [prompt_ids(text) for text in PROMPTS]
    for seed in range(MAX_SEEDS):
        randomise(model, seed)
        runs = []
        for ids in prompts:
            runs.append(greedy(model, ids))
            if not is_clear(runs):
                break
        else:
            break
    else:
        sys.exit(f"no seed below {MAX_SEEDS} gives clear answers for {name}")
    state = {
        key: value.contiguous()
        for key, value in model.state_dict().items()
        if not (key == "lm_head.weight" and config.tie_word_embeddings)
    }
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})

    # The truth comes from the files as written, read the way a user would read them.
    model = AutoModelForCausalLM.from_pretrained(directory, **options).eval()
    arrays: dict[str, np.ndarray] = {}
    for index, (ids, expected) in enumerate(zip(prompts, runs, strict=True)):
        logits, tokens, margins = greedy(model, ids)
        assert np.array_equal(tokens, expected[1]), name
        arrays |= {
            f"prompt_{index}": np.array(ids, np.int32),
            f"logits_{index}": logits,
            f"greedy_{index}": tokens,
            f"margins_{index}": margins,
        }
    np.savez_compressed(directory / "golden.npz", **arrays)
    if name in GGUF_FAMILIES:
        write_gguf(
            directory / f"tiny-{name}.gguf",
            COMMON | FAMILIES[name],
            {key: value.numpy() for key, value in state.items()},
            tokens=[*byte_symbols(), *SPECIAL_TOKENS],
            num_special=len(SPECIAL_TOKENS),
            chat_template=CHAT_TEMPLATE,
        )
    low = min(float(arrays[f"margins_{index}"].min()) for index in range(len(prompts)))
    print(f"{name}: seed {seed}, smallest margin {low:.3f}")  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    for family in sys.argv[1:] or FAMILIES:
        make_family(family)
