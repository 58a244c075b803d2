"""The decoder of the Llama line: packed tokens and a paged KV cache in, hidden states out.

One class with options covers Llama, SmolLM2, Mistral, Qwen2, Qwen3 and Gemma 2 (models/config.py).
There are two ways through its layers. Those with packed weights are a loop of calls of the native
library (`packed_layers`). Others (`decoder_layer`) are unrolled, because a loop would copy every
layer's slice; they are traced once all the same, since every layer calls the same jitted function.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from jaxengine.config import Quantization
from jaxengine.models.config import ModelConfig
from jaxengine.models.decoder_layer import DecoderLayer, Rope
from jaxengine.models.layers import (
    Linear,
    RMSNorm,
    is_packed,
    project,
    rope_frequencies,
    rope_tables,
)
from jaxengine.models.packed_layers import can_pause, run_packed_layers
from jaxengine.models.sharding import join_vocabulary, look_up
from kernels_pallas import fp8
from kernels_pallas.group_codes import CodeBits
from kernels_pallas.kv_cache import KVCache
from kernels_pallas.work_plan import AttentionBatch

__all__ = ["NO_CODES", "Decoder", "MatrixCodes", "Partway"]

DTYPES: Mapping[Quantization, DTypeLike] = {"int8": jnp.int8, "fp8": fp8.DTYPE}


class MatrixCodes(NamedTuple):
    """The bits of the codes that matrices have beside them, if they have some.

    Attributes:
        layers: of all matrices of all layers.
        head: of the output projection.
    """

    layers: CodeBits | None = None
    head: CodeBits | None = None


NO_CODES = MatrixCodes()


class Partway(NamedTuple):
    """A step between two layers. A pytree of device arrays.

    Attributes:
        stream: the residual stream.
        layer: the layer that comes next; that behind the last if all have been run.
    """

    stream: Float[Array, "T D"]
    layer: Int[Array, ""]


class Decoder(nnx.Module):
    """Embedding, layers, final norm, and the output projection.

    Weights are zeros until models.loader fills them (under `nnx.eval_shape`, nothing at all).

    Args:
        config: sizes and options.
        dtype: of the matrices.
        packed: whether they are for kernels_pallas.projection, where their sizes allow it. Tied
            embeddings then lie in memory twice: to be looked up, and to be multiplied with.
        quantization: of all matrices but the embedding, which is looked up as it is; a tied one
            then lies in memory twice as well. "fp8" leaves the output projection as it is, too.
        code_bits: which packed matrices have their codes beside them.

    Attributes:
        stack: the parameters of all layers in the arrays of one, if these are packed. Packed
            weights have an axis for layers, others get one.
        layers: all layers otherwise.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike,
        packed: bool = False,
        quantization: Quantization | None = None,
        code_bits: MatrixCodes = NO_CODES,
    ) -> None:
        self.config = config
        self.embedding = nnx.Param(jnp.zeros((config.vocab_rows, config.hidden_size), dtype))
        in_layers: DTypeLike = dtype if quantization is None else DTYPES[quantization]
        # Eight-bit floats there would lose more than in all layers together.
        in_head: DTypeLike = dtype if quantization == "fp8" else in_layers
        layer = DecoderLayer(config, dtype=in_layers, packed=packed, code_bits=code_bits.layers)
        matrices = [w for w in jax.tree.leaves(nnx.state(layer)) if w.ndim > 1]
        is_stacked = all(is_packed(w.shape) for w in matrices)
        self.stack = _stacked(layer, config.num_layers) if is_stacked else None
        self.layers = nnx.List(
            [
                DecoderLayer(config, dtype=in_layers, packed=False)
                for _ in range(0 if is_stacked else config.num_layers)
            ]
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        size = config.hidden_size
        head = Linear(
            *(size, config.vocab_rows),
            bias=False,
            dtype=in_head,
            packed=packed,
            code_bits=code_bits.head,
        )
        differs = in_head != dtype or is_packed(head.weight.shape)
        self.lm_head = head if differs or not config.tie_embeddings else None

    def __call__(
        self,
        token_ids_T: Int[Array, "T"],
        positions_T: Int[Array, "T"],
        kv_cache: KVCache,
        batch: AttentionBatch,
        *,
        num_slots: Int[Array, ""] | None = None,
        decode_only: bool,
    ) -> tuple[Float[Array, "T D"], KVCache]:
        """Run all layers over the packed tokens.

        Args:
            token_ids_T: of the packed tokens.
            positions_T: in their sequences.
            kv_cache: as of ragged_paged_attention.
            batch: likewise.
            num_slots: how many of the slots are computed, if not all are; packed layers leave
                out the others.
            decode_only: as of ragged_paged_attention.

        Returns:
            Hidden states before the final norm, and the cache with this step's K and V.
        """
        rope = rope_tables(positions_T, rope_frequencies(self.config))
        x_TD = self.embed(token_ids_T)
        windows = self.config.windows
        if self.stack is None:
            for index, layer in enumerate(self.layers):
                graph, weights = nnx.split(layer)
                number = jnp.int32(index)
                x_TD, kv_cache = _run_layer(
                    graph, weights, x_TD, rope, kv_cache, batch, number, windows[index], decode_only
                )
            return x_TD, kv_cache
        x_TD, kv_cache, _ = run_packed_layers(
            self.stack, self.config, x_TD, rope, kv_cache, batch, num_slots=num_slots
        )
        return x_TD, kv_cache

    @property
    def can_pause(self) -> bool:
        """Whether there is `go_on`."""
        return self.stack is not None and can_pause(self.config)

    def go_on(
        self,
        begun: Partway,
        positions_T: Int[Array, "T"],
        kv_cache: KVCache,
        batch: AttentionBatch,
        *,
        num_slots: Int[Array, ""],
        serial: Int[Array, ""],
    ) -> tuple[Partway, KVCache]:
        """Run the layers that are left of a step, until it is paused.

        Args:
            begun: where it stands; before the first layer the stream is that of `embed`.
            positions_T: as of a call, like the others.
            kv_cache: likewise; others may have written to blocks that are not of this step.
            batch: likewise.
            num_slots: likewise.
            serial: of kernels_pallas.native.NativeLibrary, a new one each time.

        Returns:
            Where it stands now, and the cache.
        """
        assert self.stack is not None  # can_pause
        rope = rope_tables(positions_T, rope_frequencies(self.config))
        x_TD, kv_cache, layer = run_packed_layers(
            self.stack,
            self.config,
            begun.stream,
            rope,
            kv_cache,
            batch,
            num_slots=num_slots,
            begins=begun.layer,
            serial=serial,
        )
        return Partway(x_TD, layer), kv_cache

    def embed(self, token_ids_T: Int[Array, "T"]) -> Float[Array, "T D"]:
        """Return the residual stream before the first layer."""
        x_TD = look_up(self.embedding[...], token_ids_T, self.config)
        if self.config.is_gemma2:
            # Rounded as the weights are, which Gemma was trained with.
            scale = jnp.asarray(self.config.hidden_size**0.5, self.embedding[...].dtype)
            x_TD = x_TD * scale.astype(jnp.float32)
        return x_TD

    def logits(
        self, x_SD: Float[Array, "S D"], *, wanted_S: Bool[Array, "S"] | None = None
    ) -> Float[Array, "S V"]:
        """Return f32 logits of the given hidden states; call it only where a token is sampled.

        Args:
            x_SD: the hidden states.
            wanted_S: whose logits matter, if not all do: packed weights leave out the others.
        """
        if self.lm_head is None:
            logits_SV = project(self.norm(x_SD), self.embedding[...])
        else:
            logits_SV = self.lm_head(x_SD, norm=self.norm, wanted_T=wanted_S)
        cap = self.config.logit_soft_cap
        if cap is not None:
            logits_SV = cap * jnp.tanh(logits_SV / cap)
        return join_vocabulary(logits_SV, self.config)

    @property
    def can_pick_tokens(self) -> bool:
        """Whether `pick_tokens` can be called."""
        config = self.config
        # A soft cap may round different logits to the same.
        is_whole = config.vocab_rows == config.vocab_size and config.logit_soft_cap is None
        return is_whole and self.lm_head is not None and is_packed(self.lm_head.weight.shape)

    def pick_tokens(
        self, x_SD: Float[Array, "S D"], *, wanted_S: Bool[Array, "S"]
    ) -> Int[Array, "S"]:
        """Return for each row that is wanted the first of its largest `logits`, 0 for others.

        The logits never reach memory.
        """
        assert self.lm_head is not None  # can_pick_tokens
        return self.lm_head.pick_largest(x_SD, norm=self.norm, wanted_T=wanted_S)


@partial(jax.jit, static_argnames=("graph", "window", "decode_only"))
def _run_layer(
    graph: nnx.GraphDef[DecoderLayer],
    weights: nnx.State[Any, Any],
    x_TD: Array,
    rope: Rope,
    kv_cache: KVCache,
    batch: AttentionBatch,
    index: Array,
    window: int | None,
    decode_only: bool,
) -> tuple[Array, KVCache]:
    """Run one layer. Layers have equal graphs and shapes: those of one window share the trace."""
    layer = nnx.merge(graph, weights)
    return layer(x_TD, rope, kv_cache, batch, layer=index, window=window, decode_only=decode_only)


def _stacked(layer: DecoderLayer, num_layers: int) -> DecoderLayer:
    """Return a layer with room for the parameters of all."""

    def stack(w: Array) -> Array:
        return jnp.zeros((num_layers, *(w.shape[1:] if is_packed(w.shape) else w.shape)), w.dtype)

    nnx.update(layer, jax.tree.map(stack, nnx.state(layer)))
    return layer
