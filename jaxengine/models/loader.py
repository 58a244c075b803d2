"""Fill a decoder with the tensors of a checkpoint."""

from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

import jax
import numpy as np
from flax import nnx
from jaxtyping import DTypeLike
from numpy.typing import NDArray

from jaxengine.errors import ModelError
from jaxengine.models.config import ModelConfig
from jaxengine.models.decoder import Decoder
from kernels_pallas.projection import pack, unpacked_shape

__all__ = ["TensorSource", "load_decoder"]


class TensorSource(Protocol):
    """Tensors of a checkpoint under their Hugging Face names, [out, in]."""

    def names(self) -> frozenset[str]: ...

    def get(self, name: str) -> NDArray[np.generic]: ...


def load_decoder(
    config: ModelConfig,
    source: TensorSource,
    *,
    dtype: DTypeLike,
    packed: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Build the decoder and load its weights, each straight to the device.

    Norms and biases stay f32 whatever the dtype.

    Args:
        config: what the decoder looks like.
        source: the checkpoint.
        dtype: of the matrices.
        packed: as of Decoder.
        progress: called with (tensors loaded, tensors in all).

    Raises:
        ModelError: a tensor is missing, unknown, or has another shape than the config says.
    """
    decoder = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, packed=packed))
    parts = _tensor_parts(config)
    _check_names(config, {part.name for joined in parts.values() for part in joined}, source)
    flat = nnx.to_flat_state(nnx.state(decoder))
    loaded = []
    for index, (path, variable) in enumerate(flat):
        arrays = []
        for part in parts[path]:
            array = source.get(part.name)
            row_shape = unpacked_shape(variable.shape)[1:] if variable.ndim > 1 else ()
            expected = (part.num_rows, *row_shape)
            if array.shape != expected:
                raise ModelError(
                    f"tensor {part.name} has shape {array.shape}, the config says {expected}"
                )
            arrays.append(array)
        value = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=0)
        value = value.astype(variable.dtype)
        if value.shape != variable.shape:
            value = pack(value)
        loaded.append((path, variable.replace(jax.device_put(value))))
        if progress is not None:
            progress(index + 1, len(flat))
    nnx.update(decoder, nnx.from_flat_state(loaded))
    return decoder


class _Part(NamedTuple):
    """A tensor of the checkpoint, and the rows that it must have."""

    name: str
    num_rows: int


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


def _tensor_parts(config: ModelConfig) -> dict[tuple[Hashable, ...], tuple[_Part, ...]]:
    """Map each parameter of the decoder to the tensors that it is made of, stacked by rows."""
    vocab, model, hidden = config.vocab_rows, config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts: dict[tuple[Hashable, ...], tuple[_Part, ...]] = {
        ("embedding",): (_Part("model.embed_tokens.weight", vocab),),
        ("norm", "scale"): (_Part("model.norm.weight", model),),
    }
    # The decoder has one of its own for tied embeddings only if it is packed.
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    parts["lm_head",] = (_Part(head, vocab),)
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
        for our_norm, their_norm in (
            ("input_norm", "input_layernorm"),
            ("post_attention_norm", "post_attention_layernorm"),
        ):
            parts[*ours, our_norm, "scale"] = (_Part(f"{theirs}{their_norm}.weight", model),)
        parts[*ours, "mlp", "gate_up_proj", "weight"] = (
            _Part(mlp + "gate_proj.weight", hidden),
            _Part(mlp + "up_proj.weight", hidden),
        )
        parts[*ours, "mlp", "down_proj", "weight"] = (_Part(mlp + "down_proj.weight", model),)
    return parts
