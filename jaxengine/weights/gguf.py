"""Reader of GGUF files, versions 2 and 3, little-endian.

    magic "GGUF" · u32 version · u64 tensors · u64 metadata entries
    metadata: string key · u32 type · value          (arrays: u32 element type · u64 count)
    tensors:  string name · u32 dims · u64 sizes, fastest first · u32 type · u64 offset
    padding to the alignment · tensor data

The file is untrusted: every count, size product, offset and length is checked against the size of
the file before anything is allocated, so a bad file gives a `ModelError` and costs no memory.
"""

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from jaxengine.errors import ModelError
from jaxengine.weights.gguf_quants import BLOCK_FORMATS, dequantize
from kernels_pallas.group_codes import CodeBits, GroupCodes

__all__ = ["GGUFFile", "MetadataValue"]

type MetadataValue = bool | int | float | str | list[str] | np.ndarray

MAX_DIMS = 4
MAX_NAME_BYTES = 65_535
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
# Smallest encodings, used to bound counts: an empty key, its type and a one-byte value; an empty
# name, one dimension, a type and an offset.
MIN_ENTRY_BYTES = 8 + 4 + 1
MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

BOOL_TYPE, STRING_TYPE, ARRAY_TYPE = 7, 8, 9
NUMBER_TYPES: dict[int, np.dtype[np.generic]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    """Where a tensor lies; `shape` is outermost first, `offset` counts from the file's start."""

    shape: tuple[int, ...]
    type_id: int
    offset: int


class GGUFFile:
    """One memory-mapped GGUF file; tensors are decoded when they are asked for.

    The mapping lives as long as this object and the arrays it handed out. The file must not be
    truncated meanwhile.

    Attributes:
        path: the file.
        metadata: key to value; numeric arrays are numpy arrays, string arrays lists.

    Raises:
        ModelError: the file cannot be read or is not a well-formed GGUF file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"cannot read {path}: {error}") from error
        cursor = _Cursor(self._data, path)
        num_tensors, num_entries = cursor.header()
        self.metadata: Mapping[str, MetadataValue] = MappingProxyType(cursor.metadata(num_entries))
        self._tensors = cursor.tensors(num_tensors, self.metadata)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, outermost dimension first: [out, in] for a matrix."""
        return self._entry(name).shape

    def tensor(self, name: str) -> np.ndarray:
        """A tensor as float32, [out, in] for a matrix; F32 tensors are read-only views.

        Raises:
            ModelError: no such tensor.
        """
        entry = self._entry(name)
        block_format = BLOCK_FORMATS[entry.type_id]
        data = self._stored(entry)
        return dequantize(block_format, data, math.prod(entry.shape)).reshape(entry.shape)

    def code_bits(self, name: str) -> CodeBits | None:
        """The bits of the codes of a matrix; None if it has none that `codes` gives.

        Raises:
            ModelError: no such tensor.
        """
        entry = self._entry(name)
        return BLOCK_FORMATS[entry.type_id].code_bits if len(entry.shape) == 2 else None

    def codes(self, name: str) -> GroupCodes:
        """A matrix in the codes that it is stored in.

        Raises:
            ModelError: no such tensor, or it is no matrix in such codes.
        """
        entry = self._entry(name)
        block_format = BLOCK_FORMATS[entry.type_id]
        if block_format.split is None or self.code_bits(name) is None:
            raise ModelError(f"{self.path}: tensor {name!r:.80} is no matrix in codes")
        blocks = self._stored(entry).reshape(-1, block_format.block_bytes)
        # What is infinite here has become so in the weights themselves.
        with np.errstate(over="ignore", invalid="ignore"):
            codes, scales, minima = block_format.split(blocks)
        rows = entry.shape[0]
        return GroupCodes(
            codes.reshape(entry.shape), scales.reshape(rows, -1), minima.reshape(rows, -1)
        )

    def _stored(self, entry: _TensorEntry) -> np.ndarray:
        """The bytes of a tensor, u8[n]."""
        block_format = BLOCK_FORMATS[entry.type_id]
        num_blocks = math.prod(entry.shape) // block_format.block_elements
        return np.frombuffer(
            self._data, np.uint8, num_blocks * block_format.block_bytes, entry.offset
        )

    def _entry(self, name: str) -> _TensorEntry:
        try:
            return self._tensors[name]
        except KeyError:
            raise ModelError(f"{self.path} has no tensor {name!r}") from None


class _Cursor:
    """Reads the head of the file from start to end; every read is checked against the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._size = len(data)
        self._position = 0

    def header(self) -> tuple[int, int]:
        """Number of tensors and of metadata entries."""
        if self._take(4) != b"GGUF":
            raise ModelError(f"{self._path} is not a GGUF file")
        version = self._u32()
        if version not in (2, 3):
            raise self._error(f"version {version} is not supported (2 and 3 are)")
        num_tensors = self._count(self._u64(), MIN_TENSOR_BYTES, "tensors")
        num_entries = self._count(self._u64(), MIN_ENTRY_BYTES, "metadata entries")
        return num_tensors, num_entries

    def metadata(self, num_entries: int) -> dict[str, MetadataValue]:
        """All metadata entries."""
        metadata: dict[str, MetadataValue] = {}
        for _ in range(num_entries):
            key = self._name("metadata key")
            if key in metadata:
                raise self._error(f"metadata key {key!r} appears twice")
            metadata[key] = self._value(self._u32(), key)
        return metadata

    def tensors(
        self, num_tensors: int, metadata: Mapping[str, MetadataValue]
    ) -> dict[str, _TensorEntry]:
        """All tensors, each proven to lie inside the file."""
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if (
            not isinstance(alignment, int)
            or not 8 <= alignment <= MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            raise self._error(f"general.alignment is {alignment!r}")
        found: dict[str, tuple[tuple[int, ...], int, int, int]] = {}
        for _ in range(num_tensors):
            name = self._name("tensor name")
            if name in found:
                raise self._error(f"tensor {name!r} appears twice")
            found[name] = self._tensor_info(name, alignment)
        data_start = -(-self._position // alignment) * alignment
        tensors: dict[str, _TensorEntry] = {}
        for name, (shape, type_id, offset, num_bytes) in found.items():
            end = data_start + offset + num_bytes
            if end > self._size:
                raise self._error(f"tensor {name!r} ends at {end}, after the end ({self._size})")
            tensors[name] = _TensorEntry(shape, type_id, data_start + offset)
        return tensors

    def _tensor_info(self, name: str, alignment: int) -> tuple[tuple[int, ...], int, int, int]:
        """Shape, type, offset within the data and bytes of one tensor."""
        num_dims = self._u32()
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._error(f"tensor {name!r} has {num_dims} dimensions")
        sizes = [self._u64() for _ in range(num_dims)]
        type_id, offset = self._u32(), self._u64()
        block_format = BLOCK_FORMATS.get(type_id)
        if block_format is None:
            known = ", ".join(known.name for known in BLOCK_FORMATS.values())
            raise self._error(f"tensor {name!r} has type {type_id}; supported are {known}")
        if min(sizes) < 1 or sizes[0] % block_format.block_elements:
            raise self._error(f"tensor {name!r} of type {block_format.name} has sizes {sizes}")
        if offset % alignment:
            raise self._error(f"tensor {name!r} has the unaligned offset {offset}")
        num_bytes = math.prod(sizes) // block_format.block_elements * block_format.block_bytes
        return tuple(reversed(sizes)), type_id, offset, num_bytes

    def _value(self, type_id: int, key: str) -> MetadataValue:
        if type_id == STRING_TYPE:
            return self._string(key)
        if type_id == ARRAY_TYPE:
            return self._array(key)
        dtype = self._number_type(type_id, key)
        value = np.frombuffer(self._take(dtype.itemsize), dtype)[0].item()
        return bool(value) if type_id == BOOL_TYPE else value

    def _array(self, key: str) -> list[str] | np.ndarray:
        type_id = self._u32()
        if type_id == STRING_TYPE:
            count = self._count(self._u64(), 8, f"strings in {key!r}")
            return [self._string(key) for _ in range(count)]
        dtype = self._number_type(type_id, key)
        count = self._count(self._u64(), dtype.itemsize, f"elements in {key!r}")
        array = np.frombuffer(self._take(count * dtype.itemsize), dtype)
        return array.astype(bool) if type_id == BOOL_TYPE else array

    def _number_type(self, type_id: int, key: str) -> np.dtype[np.generic]:
        dtype = NUMBER_TYPES.get(type_id)
        if dtype is None:
            raise self._error(f"metadata {key!r} has the unsupported type {type_id}")
        return dtype

    def _name(self, what: str) -> str:
        name = self._string(what)
        if len(name) > MAX_NAME_BYTES:
            raise self._error(f"a {what} has {len(name)} characters")
        return name

    def _string(self, what: str) -> str:
        length = self._u64()
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not UTF-8") from error

    def _count(self, count: int, element_bytes: int, what: str) -> int:
        left = self._size - self._position
        if count * element_bytes > left:
            raise self._error(f"{count} {what} cannot fit in the {left} bytes that are left")
        return count

    def _u32(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _u64(self) -> int:
        return int.from_bytes(self._take(8), "little")

    def _take(self, count: int) -> bytes:
        end = self._position + count
        if end > self._size:
            raise self._error(f"it ends at {self._size}, inside a field that ends at {end}")
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def _error(self, problem: str) -> ModelError:
        # Names in the message come from the file; keep it one printable line of bounded length.
        return ModelError(f"{self._path} is not a well-formed GGUF file: {problem[:300]}")
