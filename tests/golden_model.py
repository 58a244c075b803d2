"""Where golden data and models for tests lie."""

import functools
from pathlib import Path

from jaxengine.weights.source import ModelFiles, resolve_model

GOLDEN_DIR = Path(__file__).parent / "golden"
TINY_DIR = GOLDEN_DIR / "tiny"
TINY_FAMILIES = (
    *("llama", "llama3_rope", "mistral", "qwen2", "qwen3"),
    *("mistral_window", "qwen2_window", "gemma2"),
)
TINY_GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")


@functools.cache
def default_model_files() -> ModelFiles:
    """The real default model, downloaded once; only for tests marked `model`."""
    return resolve_model(None)


def tiny_model_files(family: str) -> ModelFiles:
    """A tiny safetensors directory with a byte-level tokenizer and a ChatML template."""
    return resolve_model(str(TINY_DIR / family))


def tiny_gguf_files(architecture: str) -> ModelFiles:
    """The same weights and tokenizer as one GGUF file."""
    return resolve_model(str(TINY_DIR / architecture / f"tiny-{architecture}.gguf"))
