"""One view of a model, whatever its files: Hugging Face names, numpy arrays, [out, in]."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from jaxengine.errors import ModelError
from jaxengine.weights.gguf import GGUFFile
from jaxengine.weights.gguf_to_hf import gguf_hf_config, gguf_tensor_map, restore_rotary_rows
from jaxengine.weights.hf_config import load_hf_config
from jaxengine.weights.safetensors import SafetensorsDirectory
from jaxengine.weights.source import ModelFiles

__all__ = ["Checkpoint", "open_checkpoint"]


class Checkpoint(Protocol):
    """Configuration and tensors of a model."""

    @property
    def hf_config(self) -> Mapping[str, Any]:
        """The configuration, normalised as `jaxengine.weights.hf_config` says."""

    def names(self) -> frozenset[str]:
        """Hugging Face names of all tensors, such as model.layers.0.self_attn.q_proj.weight.

        With tied embeddings there may be no lm_head.weight.
        """

    def get(self, name: str) -> np.ndarray:
        """A tensor, [out, in] for a matrix: float32, or float16 or bfloat16 if stored so.

        The array may be a read-only view of the file.

        Raises:
            ModelError: no such tensor, or it cannot be read.
        """


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """Open the weights without reading them.

    Raises:
        ModelError: files that are damaged, or a model that headrace cannot run.
    """
    if files.kind == "gguf":
        return _GGUFCheckpoint(GGUFFile(files.path))
    return _SafetensorsCheckpoint(files)


class _SafetensorsCheckpoint:
    def __init__(self, files: ModelFiles) -> None:
        self.hf_config: Mapping[str, Any] = load_hf_config(files.path)
        self._tensors = SafetensorsDirectory(files.path)

    def names(self) -> frozenset[str]:
        return self._tensors.names()

    def get(self, name: str) -> np.ndarray:
        return self._tensors.get(name)


class _GGUFCheckpoint:
    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.hf_config: Mapping[str, Any] = gguf_hf_config(file)
        self._gguf_names = gguf_tensor_map(file)

    def names(self) -> frozenset[str]:
        return frozenset(self._gguf_names)

    def get(self, name: str) -> np.ndarray:
        gguf_name = self._gguf_names.get(name)
        if gguf_name is None:
            raise ModelError(f"{self._file.path} has no tensor for {name!r:.80}")
        weight = self._file.tensor(gguf_name)
        if self.hf_config["model_type"] != "llama":
            return weight
        if ".q_proj." in name:
            return restore_rotary_rows(weight, self.hf_config["num_attention_heads"])
        if ".k_proj." in name:
            return restore_rotary_rows(weight, self.hf_config["num_key_value_heads"])
        return weight
