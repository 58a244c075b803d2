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
from kernels_pallas.group_codes import CodeBits, GroupCodes

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

    def code_bits(self, name: str) -> CodeBits | None:
        """The bits of the codes that a matrix is stored in; None if `get_codes` does not have it.

        Raises:
            ModelError: no such tensor.
        """

    def get_codes(self, name: str) -> GroupCodes:
        """A matrix in its codes; their numbers are what `get` returns.

        Raises:
            ModelError: no such matrix, or it cannot be read.
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

    def code_bits(self, name: str) -> CodeBits | None:
        return None

    def get_codes(self, name: str) -> GroupCodes:
        raise ModelError(f"{name!r:.80} is not stored in codes")


class _GGUFCheckpoint:
    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.hf_config: Mapping[str, Any] = gguf_hf_config(file)
        self._gguf_names = gguf_tensor_map(file)

    def names(self) -> frozenset[str]:
        return frozenset(self._gguf_names)

    def get(self, name: str) -> np.ndarray:
        return self._restored(name, self._file.tensor(self._gguf_name(name)))

    def code_bits(self, name: str) -> CodeBits | None:
        return self._file.code_bits(self._gguf_name(name))

    def get_codes(self, name: str) -> GroupCodes:
        weights = self._file.codes(self._gguf_name(name))
        return GroupCodes(*(self._restored(name, part) for part in weights))

    def _gguf_name(self, name: str) -> str:
        gguf_name = self._gguf_names.get(name)
        if gguf_name is None:
            raise ModelError(f"{self._file.path} has no tensor for {name!r:.80}")
        return gguf_name

    def _restored(self, name: str, rows: np.ndarray) -> np.ndarray:
        """What belongs to the rows of a tensor, in the order of Hugging Face's."""
        if self.hf_config["model_type"] != "llama":
            return rows
        if ".q_proj." in name:
            return restore_rotary_rows(rows, self.hf_config["num_attention_heads"])
        if ".k_proj." in name:
            return restore_rotary_rows(rows, self.hf_config["num_key_value_heads"])
        return rows
