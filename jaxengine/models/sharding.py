"""A model cut into shards, one for each of several devices (tensor parallelism).

A shard is a decoder of its own, with a part of the heads, of the MLP and of the vocabulary. All
devices run the same program, each on its own shard and its own part of the KV cache; what they
must agree on they add up or join here. Norms and the residual stream are the same on all.

The functions below are for the inside of a `jax.shard_map` over the axis AXIS; with one shard they
do nothing of that. Letters: T packed tokens, S sequences, D model, V vocabulary.
"""

from dataclasses import replace

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxengine.models.config import ModelConfig

__all__ = ["AXIS", "add_up", "join_vocabulary", "look_up", "shard_of"]

# The axis of the mesh.
AXIS = "tensor"


def shard_of(model: ModelConfig, num_shards: int) -> ModelConfig:
    """Return the configuration of one of `num_shards` equal shards of a whole model.

    Where there are fewer kv heads than shards, several shards hold the same one.

    Raises:
        ValueError: the model cannot be divided so.
    """
    if not _fits(model, num_shards):
        fitting = [str(n) for n in range(1, model.num_heads + 1) if _fits(model, n)]
        raise ValueError(
            f"tensor_parallel_size {num_shards} does not divide this model of {model.num_heads} "
            f"query heads, {model.num_kv_heads} kv heads, hidden size {model.hidden_size} and MLP "
            f"size {model.intermediate_size}; possible are {', '.join(fitting)}"
        )
    return replace(
        model,
        num_heads=model.num_heads // num_shards,
        num_kv_heads=max(model.num_kv_heads // num_shards, 1),
        intermediate_size=model.intermediate_size // num_shards,
        num_shards=num_shards,
    )


def _fits(model: ModelConfig, num_shards: int) -> bool:
    kv_heads = model.num_kv_heads
    return not (
        model.num_heads % num_shards
        or model.hidden_size % num_shards
        or model.intermediate_size % num_shards
        or (kv_heads % num_shards and num_shards % kv_heads)
    )


def add_up(x_TD: Float[Array, "T D"], num_shards: int) -> Float[Array, "T D"]:
    """Return the sum of what the shards have, the same on all, in an order that never changes.

    A sum of two is the same in either order. For more, an all-reduce that goes around a ring adds
    each element in an order that depends on where in the array it lies, so on the neighbours of
    its token. Here each device adds up one part of every row, in the order of the shards, and
    hands it to the others: what an all-reduce moves, in the same number of bytes.
    """
    if num_shards == 1:
        return x_TD
    if num_shards == 2:
        total: Array = lax.psum(x_TD, AXIS)
        return total
    num_tokens, size = x_TD.shape
    parts = x_TD.reshape(num_tokens, num_shards, size // num_shards)
    # [shard that it comes from, T, part of D]
    parts = lax.all_to_all(parts.swapaxes(0, 1), AXIS, split_axis=0, concat_axis=0, tiled=True)
    own = parts[0]
    for index in range(1, num_shards):
        own = own + parts[index]
    joined: Array = lax.all_gather(own, AXIS, axis=1, tiled=True)
    return joined


def look_up(
    table: Float[Array, "V D"], token_ids_T: Int[Array, "T"], config: ModelConfig
) -> Float[Array, "T D"]:
    """Return the embeddings of tokens in f32, out of a shard's rows of the table."""
    if config.vocab_rows == config.vocab_size:
        return table[token_ids_T].astype(jnp.float32)
    rows = token_ids_T - lax.axis_index(AXIS) * config.vocab_rows
    is_own = (rows >= 0) & (rows < config.vocab_rows)
    found = table[jnp.where(is_own, rows, 0)].astype(jnp.float32)
    # All but one are zero, so the order does not matter.
    embeddings: Array = lax.psum(jnp.where(is_own[:, None], found, 0.0), AXIS)
    return embeddings


def join_vocabulary(logits_SV: Float[Array, "S V"], config: ModelConfig) -> Float[Array, "S V"]:
    """Return the logits of all tokens from those of a shard's."""
    if config.vocab_rows == config.vocab_size:
        return logits_SV
    joined: Array = lax.all_gather(logits_SV, AXIS, axis=1, tiled=True)
    return joined
