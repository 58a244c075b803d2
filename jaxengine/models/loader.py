"""Fill a decoder with the tensors of a checkpoint."""

import math
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from flax import nnx
from jaxtyping import DTypeLike
from numpy.typing import NDArray

from jaxengine.config import Quantization
from jaxengine.errors import ModelError
from jaxengine.models.config import ModelConfig
from jaxengine.models.decoder import NO_CODES, Decoder, MatrixCodes
from jaxengine.models.layers import is_packed
from kernels_pallas import fp8, int8
from kernels_pallas.group_codes import CodeBits, GroupCodes, pack_codes
from kernels_pallas.projection import pack, unpacked_shape

__all__ = ["CodeSource", "TensorSource", "load_decoder"]

# Parameters that are read and arranged at the same time.
NUM_THREADS = max(2, min(8, os.cpu_count() or 1))

# The device takes over arrays that begin at a multiple of this as they are, where it is the CPU.
ALIGNMENT = 64

# The parameters of a module that are made with its weight.
BESIDE_WEIGHTS = ("weight_scale", "codes")

Path = tuple[Hashable, ...]

# Norms of a layer, as we and as Hugging Face name them.
NORMS = {"input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
GEMMA2_NORMS = {
    "input_norm": "input_layernorm",
    "attended_norm": "post_attention_layernorm",
    "post_attention_norm": "pre_feedforward_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}


class TensorSource(Protocol):
    """Tensors of a checkpoint under their Hugging Face names, [out, in]."""

    def names(self) -> frozenset[str]: ...

    def get(self, name: str) -> NDArray[np.generic]: ...


class CodeSource(TensorSource, Protocol):
    """The same, with matrices that are stored in codes (kernels_pallas.group_codes)."""

    def code_bits(self, name: str) -> CodeBits | None: ...

    def get_codes(self, name: str) -> GroupCodes: ...


class _Part(NamedTuple):
    """A tensor of the checkpoint, the rows that it must have, and what is added to it."""

    name: str
    num_rows: int
    offset: float = 0.0


# What a parameter of one layer is made of, stacked by rows.
_Parts = tuple[_Part, ...]


def load_decoder(
    config: ModelConfig,
    source: TensorSource,
    *,
    dtype: DTypeLike,
    packed: bool = False,
    quantization: Quantization | None = None,
    codes: CodeSource | None = None,
    device: jax.Device | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Build the decoder and load its weights, each straight to the device.

    Norms and biases stay f32 whatever the dtype.

    Args:
        config: what the decoder looks like.
        source: the checkpoint; asked by several threads.
        dtype: of the matrices.
        packed: as of Decoder.
        quantization: as of Decoder.
        codes: the source, if packed matrices that it has in codes are to have these beside them.
        device: where to; None is JAX's first.
        progress: called with (tensors loaded, tensors in all), a joined one counted once.

    Raises:
        ModelError: a tensor is missing, unknown, or has another shape than the config says.
    """
    tensors = _tensors(config)
    _check_names(config, {part.name for parts in tensors.values() for part in parts}, source)
    code_bits = NO_CODES if codes is None else _code_bits(tensors, codes)
    decoder = nnx.eval_shape(
        lambda: Decoder(
            config, dtype=dtype, packed=packed, quantization=quantization, code_bits=code_bits
        )
    )
    variables: dict[Any, Any] = dict(nnx.to_flat_state(nnx.state(decoder)))
    # Scales and codes are made with the weights that they belong to.
    read = [path for path in variables if path[-1] not in BESIDE_WEIGHTS]
    made_of = [_parameter_tensors(path, tensors, config.num_layers) for path in read]
    num_loaded, total, lock = 0, sum(map(len, made_of)), Lock()

    def load(path: Path, joined: Sequence[_Parts]) -> list[tuple[Any, Any]]:
        nonlocal num_loaded
        paths = [path]
        if path[-1] == "weight":
            paths += [(*path[:-1], name) for name in BESIDE_WEIGHTS]
        made = {p: variables[p] for p in paths if p in variables}
        arrays = {p: _empty(variable.shape, variable.dtype) for p, variable in made.items()}
        array = arrays[path]
        scales, packed_codes = (arrays.get((*path[:-1], name)) for name in BESIDE_WEIGHTS)
        for index, parts in enumerate(joined):
            place = array[index] if path[0] == "stack" or is_packed(array.shape) else array
            value = _read(place, parts, source)
            if scales is not None:
                quantize = fp8.quantize if array.dtype == fp8.DTYPE else int8.quantize
                value, scale = quantize(value)
                (scales[index] if path[0] == "stack" else scales)[...] = scale
            if packed_codes is not None and codes is not None:
                pack_codes(_read_codes(parts, codes), packed_codes[index])
            if place.ndim > 2:
                pack(value, place)
            else:
                place[...] = value
            with lock:
                num_loaded += 1
                if progress is not None:
                    progress(num_loaded, total)
        return [(p, old.replace(jax.device_put(arrays[p], device))) for p, old in made.items()]

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        loaded = [item for items in pool.map(load, read, made_of) for item in items]
    nnx.update(decoder, nnx.from_flat_state(loaded))
    return decoder


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> NDArray[np.generic]:
    """Return an array that begins at a multiple of ALIGNMENT."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def _read(place: NDArray[np.generic], parts: _Parts, source: TensorSource) -> NDArray[np.generic]:
    """Return tensors, stacked by rows, that fit where they belong."""
    packed = place.ndim > 2
    arrays = []
    for part in parts:
        array = source.get(part.name)
        row_shape = (unpacked_shape((1, *place.shape))[1],) if packed else place.shape[1:]
        expected = (part.num_rows, *row_shape)
        if array.shape != expected:
            raise ModelError(
                f"tensor {part.name} has shape {array.shape}, the config says {expected}"
            )
        arrays.append(array.astype(np.float32) + part.offset if part.offset else array)
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=0)


def _code_bits(tensors: Mapping[Path, _Parts], source: CodeSource) -> MatrixCodes:
    """Return what can be kept in codes: all matrices of all layers or none, and the head."""

    def common(in_layers: bool) -> CodeBits | None:
        bits = {
            source.code_bits(part.name)
            for path, parts in tensors.items()
            if path[-1] == "weight" and (path[0] == "layers") == in_layers
            for part in parts
        }
        return bits.pop() if len(bits) == 1 else None

    return MatrixCodes(layers=common(True), head=common(False))


def _read_codes(parts: _Parts, source: CodeSource) -> GroupCodes:
    """Return matrices in codes, stacked by rows."""
    matrices = [source.get_codes(part.name) for part in parts]
    return GroupCodes(*map(np.concatenate, zip(*matrices, strict=True)))


def _parameter_tensors(path: Path, tensors: Mapping[Path, _Parts], num_layers: int) -> list[_Parts]:
    """Return the tensors that a parameter is made of: of all layers if it is theirs."""
    if path[0] == "stack":
        return [tensors["layers", index, *path[1:]] for index in range(num_layers)]
    return [tensors[path]]


def _check_names(config: ModelConfig, needed: set[str], source: TensorSource) -> None:
    """Raise ModelError unless the checkpoint has what is needed, and nothing else that matters."""
    available = source.names()
    if missing := sorted(needed - available):
        raise ModelError(f"the checkpoint lacks {len(missing)} tensors, the first is {missing[0]}")
    unused = sorted(
        name
        for name in available - needed
        # Old checkpoints carry the rotary frequencies; tied ones may carry the table twice.
        if not name.endswith("rotary_emb.inv_freq")
        and not (config.tie_embeddings and name == "lm_head.weight")
    )
    if unused:
        raise ModelError(
            f"the checkpoint has {len(unused)} tensors that its config does not call for, "
            f"the first is {unused[0]}"
        )


def _tensors(config: ModelConfig) -> dict[Path, _Parts]:
    """Map each parameter of a decoder with single layers to its tensors, stacked by rows."""
    vocab, model, hidden = config.vocab_rows, config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    norm_offset = 1.0 if config.is_gemma2 else 0.0
    parts: dict[Path, _Parts] = {
        ("embedding",): (_Part("model.embed_tokens.weight", vocab),),
        ("norm", "scale"): (_Part("model.norm.weight", model, norm_offset),),
    }
    # The decoder has one of its own for tied embeddings only if it is packed or of eight bits.
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    parts["lm_head", "weight"] = (_Part(head, vocab),)
    for index in range(config.num_layers):
        ours, theirs = ("layers", index), f"model.layers.{index}."
        attention, mlp = theirs + "self_attn.", theirs + "mlp."
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            parts[*ours, "attention", "qkv_proj", kind] = (
                _Part(f"{attention}q_proj.{kind}", q_size),
                _Part(f"{attention}k_proj.{kind}", kv_size),
                _Part(f"{attention}v_proj.{kind}", kv_size),
            )
        if config.qk_norm:
            for norm in ("q_norm", "k_norm"):
                parts[*ours, "attention", norm, "scale"] = (
                    _Part(f"{attention}{norm}.weight", config.head_dim),
                )
        parts[*ours, "attention", "o_proj", "weight"] = (_Part(attention + "o_proj.weight", model),)
        for our_norm, their_norm in (GEMMA2_NORMS if config.is_gemma2 else NORMS).items():
            parts[*ours, our_norm, "scale"] = (
                _Part(f"{theirs}{their_norm}.weight", model, norm_offset),
            )
        parts[*ours, "mlp", "gate_up_proj", "weight"] = (
            _Part(mlp + "gate_proj.weight", hidden),
            _Part(mlp + "up_proj.weight", hidden),
        )
        parts[*ours, "mlp", "down_proj", "weight"] = (_Part(mlp + "down_proj.weight", model),)
    return parts
