"""Load a model that several devices share, each shard straight to its device."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding
from jaxtyping import DTypeLike
from numpy.typing import NDArray

from jaxengine.config import Quantization
from jaxengine.errors import ModelError
from jaxengine.models.config import ModelConfig
from jaxengine.models.decoder import Decoder
from jaxengine.models.loader import TensorSource, load_decoder
from jaxengine.models.sharding import shard_of

__all__ = ["ShardSource", "load_shards"]


class _Cut(NamedTuple):
    """Which part of a tensor: `size` rows (axis 0) or columns (axis 1) from `start` on.

    Attributes:
        whole: what the checkpoint must have of them.
    """

    axis: int
    start: int
    size: int
    whole: int


class ShardSource:
    """One shard of a checkpoint, under the names of the whole: a checkpoint of a smaller model.

    Args:
        source: the whole.
        model: its configuration.
        num_shards: how many there are.
        index: which of them.
    """

    def __init__(
        self, source: TensorSource, model: ModelConfig, *, num_shards: int, index: int
    ) -> None:
        self._source = source
        shard = shard_of(model, num_shards)
        head_dim, hidden = model.head_dim, shard.intermediate_size
        q_size, kv_size = shard.num_heads * head_dim, shard.num_kv_heads * head_dim
        # Shards that share a kv head follow each other, as do the query heads that attend to it.
        first_kv_head = index * model.num_kv_heads // num_shards
        q_cut = (index * q_size, q_size, model.num_heads * head_dim)
        kv_cut = (first_kv_head * head_dim, kv_size, model.num_kv_heads * head_dim)
        hidden_cut = (index * hidden, hidden, model.intermediate_size)
        self._cuts = {
            "q_proj": _Cut(0, *q_cut),
            "k_proj": _Cut(0, *kv_cut),
            "v_proj": _Cut(0, *kv_cut),
            "o_proj": _Cut(1, *q_cut),
            "gate_proj": _Cut(0, *hidden_cut),
            "up_proj": _Cut(0, *hidden_cut),
            "down_proj": _Cut(1, *hidden_cut),
        }
        if shard.vocab_rows < model.vocab_size:
            rows = _Cut(0, index * shard.vocab_rows, shard.vocab_rows, model.vocab_size)
            self._cuts |= {"embed_tokens": rows, "lm_head": rows}

    def names(self) -> frozenset[str]:
        return self._source.names()

    def get(self, name: str) -> NDArray[np.generic]:
        """Return the shard's part of a tensor; a view.

        Raises:
            ModelError: the whole tensor has another size than the model's configuration says.
        """
        array = self._source.get(name)
        cut = self._cuts.get(name.split(".")[-2])
        if cut is None:
            return array
        if array.ndim <= cut.axis or array.shape[cut.axis] != cut.whole:
            raise ModelError(
                f"tensor {name} has shape {array.shape}, the config says {cut.whole} "
                f"{'columns' if cut.axis else 'rows'}"
            )
        part = slice(cut.start, cut.start + cut.size)
        return array[:, part] if cut.axis else array[part]


def load_shards(
    model: ModelConfig,
    source: TensorSource,
    *,
    sharding: NamedSharding,
    dtype: DTypeLike,
    packed: bool = False,
    quantization: Quantization | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Load a shard on each device of a mesh that is ours, one after the other.

    Args:
        model: the whole model.
        source: the checkpoint; asked by several threads.
        sharding: along the first axis of every array, over all devices of the mesh.
        dtype: of the matrices.
        packed: as of Decoder.
        quantization: likewise.
        progress: called with (tensors loaded, tensors in all), those of each shard counted.

    Returns:
        A decoder whose graph is that of one shard, and whose arrays are those of all shards, joined
        along their first axis whatever it means.

    Raises:
        ModelError: a tensor is missing, unknown, or has another shape than the config says.
    """
    devices: list[jax.Device] = list(sharding.mesh.devices.flat)
    num_shards = len(devices)
    own = [i for i, d in enumerate(devices) if d.process_index == jax.process_index()]
    shard = shard_of(model, num_shards)

    def load(place: int, index: int) -> Decoder:
        def advance(done: int, total: int) -> None:
            if progress is not None:
                progress(place * total + done, len(own) * total)

        return load_decoder(
            shard,
            ShardSource(source, model, num_shards=num_shards, index=index),
            dtype=dtype,
            packed=packed,
            quantization=quantization,
            device=devices[index],
            progress=advance,
        )

    decoders = [load(place, index) for place, index in enumerate(own)]

    def join(*parts: Array) -> Array:
        first, *rest = parts[0].shape
        return jax.make_array_from_single_device_arrays(
            (num_shards * first, *rest), sharding, list(parts)
        )

    graph, _ = nnx.split(decoders[0])
    weights = jax.tree.map(join, *(nnx.state(decoder) for decoder in decoders))
    return nnx.merge(graph, weights)
