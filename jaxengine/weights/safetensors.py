"""Tensors of a directory of safetensors files, one file or shards listed in an index."""

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orjson
from safetensors import SafetensorError, safe_open

from jaxengine.errors import ModelError
from jaxengine.weights.hf_config import read_json_object

__all__ = ["SafetensorsDirectory"]

INDEX_NAME = "model.safetensors.index.json"

# Of the header, at the start of a file.
LENGTH_BYTES = 8

# By their names in the format.
FLOAT_TYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class SafetensorsDirectory:
    """The tensors of a model directory, as views of its files.

    Raises:
        ModelError: no weights, an index that does not fit its shards, or a damaged file.
    """

    def __init__(self, directory: Path) -> None:
        index_path = directory / INDEX_NAME
        if not index_path.exists():
            file = _File(_single_file(directory))
            self._file_of = dict.fromkeys(file.entries, file)
            return
        path_of = _read_index(index_path)
        files = {path: _File(path) for path in set(path_of.values())}
        self._file_of = {name: files[path] for name, path in path_of.items()}
        for name, file in self._file_of.items():
            if name not in file.entries:
                raise ModelError(f"{file.path} lacks the tensor {name!r:.80} that the index lists")

    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def get(self, name: str) -> np.ndarray:
        """A tensor in the type it is stored in: float32, float16 or bfloat16; read-only.

        Raises:
            ModelError: no such tensor, or one of another type.
        """
        file = self._file_of.get(name)
        if file is None:
            raise ModelError(f"the checkpoint has no tensor {name!r:.80}")
        return file.tensor(name)


class _File:
    """One file, mapped into memory.

    Raises:
        ModelError: it cannot be read, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # The library checks the header: lengths, and that the tensors fill the file exactly.
            with safe_open(path, framework="numpy"):
                pass
            with path.open("rb") as file:
                self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read {path}: {error}") from error
        self._start = LENGTH_BYTES + int.from_bytes(self._content[:LENGTH_BYTES], "little")
        entries = orjson.loads(self._content[LENGTH_BYTES : self._start])
        entries.pop("__metadata__", None)
        self.entries: Mapping[str, Mapping[str, Any]] = entries

    def tensor(self, name: str) -> np.ndarray:
        entry = self.entries[name]
        dtype = FLOAT_TYPES.get(entry["dtype"])
        if dtype is None:
            raise ModelError(
                f"{self.path}: tensor {name!r:.80} has the type {entry['dtype']}; supported are "
                f"{', '.join(FLOAT_TYPES)}"
            )
        start = self._start + entry["data_offsets"][0]
        return np.ndarray(entry["shape"], dtype, self._content, start)


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


def _single_file(directory: Path) -> Path:
    """Return the one safetensors file of a directory without an index."""
    found = sorted(directory.glob("*.safetensors"))
    if len(found) != 1:
        raise ModelError(
            f"{directory} holds {len(found)} .safetensors files and no {INDEX_NAME}; "
            "expected an index or exactly one file"
        )
    return found[0]
