"""Tensors of a directory of safetensors files, one file or shards listed in an index."""

from collections.abc import Mapping
from pathlib import Path

import ml_dtypes  # registers the name "bfloat16" with numpy, which the reader relies on
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxengine.errors import ModelError
from jaxengine.weights.hf_config import read_json_object

__all__ = ["SafetensorsDirectory"]

INDEX_NAME = "model.safetensors.index.json"
FLOAT_TYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


class SafetensorsDirectory:
    """The tensors of a model directory; each is read when it is asked for.

    Raises:
        ModelError: no weights, an index that does not fit its shards, or a damaged file.
    """

    def __init__(self, directory: Path) -> None:
        index_path = directory / INDEX_NAME
        if index_path.exists():
            self._file_of = _read_index(index_path)
        else:
            self._file_of = _single_file(directory)
        for path in set(self._file_of.values()):
            stored = _names_in(path)
            for name, owner in self._file_of.items():
                if owner == path and name not in stored:
                    raise ModelError(f"{path} lacks the tensor {name!r:.80} that the index lists")

    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def get(self, name: str) -> np.ndarray:
        """A tensor in the type it is stored in: float32, float16 or bfloat16.

        Raises:
            ModelError: no such tensor, or one of another type.
        """
        path = self._file_of.get(name)
        if path is None:
            raise ModelError(f"the checkpoint has no tensor {name!r:.80}")
        try:
            with safe_open(path, framework="numpy") as file:
                array: np.ndarray = file.get_tensor(name)
        except (OSError, SafetensorError, TypeError, AttributeError) as error:
            # TypeError and AttributeError: an element type that numpy has no name for.
            raise ModelError(f"cannot read {name!r:.80} from {path}: {error}") from error
        if array.dtype not in FLOAT_TYPES:
            raise ModelError(
                f"{path}: tensor {name!r:.80} has the type {array.dtype}; supported are "
                "float32, float16 and bfloat16"
            )
        return array


def _read_index(index_path: Path) -> Mapping[str, Path]:
    """Tensor name to shard path."""
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index_path} has no weight_map")
    paths: dict[str, Path] = {}
    for name, file_name in weight_map.items():
        # A shard lies beside its index; anything else in this untrusted field is refused.
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ModelError(f"{index_path} names the shard {file_name!r:.80}")
        paths[name] = index_path.parent / file_name
    return paths


def _single_file(directory: Path) -> Mapping[str, Path]:
    """Tensor name to the one safetensors file of a directory without an index."""
    found = sorted(directory.glob("*.safetensors"))
    if len(found) != 1:
        raise ModelError(
            f"{directory} holds {len(found)} .safetensors files and no {INDEX_NAME}; "
            "expected an index or exactly one file"
        )
    return dict.fromkeys(_names_in(found[0]), found[0])


def _names_in(path: Path) -> frozenset[str]:
    try:
        with safe_open(path, framework="numpy") as file:
            return frozenset(file.keys())
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
