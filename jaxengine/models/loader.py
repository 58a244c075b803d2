"""Fill a decoder with the tensors of a checkpoint."""

from collections.abc import Callable
from typing import Protocol

import jax
import numpy as np
from flax import nnx
from jaxtyping import DTypeLike
from numpy.typing import NDArray

from jaxengine.errors import ModelError
from jaxengine.models.config import ModelConfig
from jaxengine.models.decoder import Decoder

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
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Build the decoder and load its weights, each straight to the device.

    Matrices become `dtype`; norms and biases stay f32.

    Args:
        progress: called with (tensors loaded, tensors in all).

    Raises:
        ModelError: a tensor is missing or has another shape than the config says.
    """
    decoder = nnx.eval_shape(lambda: Decoder(config, dtype=dtype))
    names = _tensor_names(config)
    available = source.names()
    missing = sorted(name for parts in names.values() for name in parts if name not in available)
    if missing:
        raise ModelError(f"the checkpoint lacks {len(missing)} tensors, the first is {missing[0]}")
    state = nnx.state(decoder)
    flat = nnx.to_flat_state(state)
    loaded = []
    for index, (path, variable) in enumerate(flat):
        parts = [source.get(name) for name in names[path]]
        value = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=0)
        if value.shape != variable.shape:
            raise ModelError(
                f"tensor {' + '.join(names[path])} has shape {value.shape}, "
                f"the config says {variable.shape}"
            )
        loaded.append((path, variable.replace(jax.device_put(value.astype(variable.dtype)))))
        if progress is not None:
            progress(index + 1, len(flat))
    nnx.update(decoder, nnx.from_flat_state(loaded))
    return decoder


def _tensor_names(config: ModelConfig) -> dict[tuple[str | int, ...], tuple[str, ...]]:
    """Map each parameter of the decoder to the tensors that it is made of, stacked by rows."""
    names: dict[tuple[str | int, ...], tuple[str, ...]] = {
        ("embedding",): ("model.embed_tokens.weight",),
        ("norm", "scale"): ("model.norm.weight",),
    }
    if not config.tie_embeddings:
        names["lm_head",] = ("lm_head.weight",)
    for index in range(config.num_layers):
        ours, theirs = ("layers", index), f"model.layers.{index}."
        attention = theirs + "self_attn."
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            names[*ours, "attention", "qkv_proj", kind] = tuple(
                f"{attention}{part}_proj.{kind}" for part in "qkv"
            )
        if config.qk_norm:
            for part in "qk":
                names[*ours, "attention", f"{part}_norm", "scale"] = (
                    f"{attention}{part}_norm.weight",
                )
        names[*ours, "attention", "o_proj", "weight"] = (attention + "o_proj.weight",)
        names[*ours, "input_norm", "scale"] = (theirs + "input_layernorm.weight",)
        names[*ours, "post_attention_norm", "scale"] = (theirs + "post_attention_layernorm.weight",)
        names[*ours, "mlp", "gate_up_proj", "weight"] = (
            theirs + "mlp.gate_proj.weight",
            theirs + "mlp.up_proj.weight",
        )
        names[*ours, "mlp", "down_proj", "weight"] = (theirs + "mlp.down_proj.weight",)
    return names
