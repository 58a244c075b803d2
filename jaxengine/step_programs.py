"""The two programs of a step: the way through the layers, and the choice of the next tokens.

Two, since the second depends on the number of sequences only: there are fewer of these than
buckets, and what few requests ask for makes it the larger part of what has to be compiled.

Several steps of decodes can be one program, in which the first's tokens go into the second. And
where the device can pause a step, the way through the layers is a program that goes on from any of
them (docs/decisions/0031).

Letters: K steps, T packed tokens, S sequences, R rows, D model, F as in jaxengine.logprobs.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxengine.batch import pick_token_ids
from jaxengine.batch_layout import BatchLayout, ChoiceLayout, ScheduledBatch
from jaxengine.logprobs import NUM_FIELDS, prompt_logprobs
from jaxengine.models.decoder import Decoder, Partway
from jaxengine.next_token import next_tokens
from jaxengine.rule_arrays import RuleArrays
from kernels_pallas.kv_cache import KVCache

__all__ = [
    "Begun",
    "Choose",
    "Forward",
    "Forwarded",
    "GoOn",
    "Weights",
    "make_choose",
    "make_forward",
    "make_go_on",
    "make_steps",
]


class Forwarded(NamedTuple):
    """What is left of a step behind the layers; as large for all buckets of as many sequences.

    Attributes:
        hidden: states after which tokens are chosen, before the final norm.
        pending: the last token of each sequence that the host does not know; -1 if it does.
        packed: the end of the packed buffer, as in ChoiceLayout.
    """

    hidden: Float[Array, "S D"]
    pending: Int[Array, "S"]
    packed: Int[Array, "_"]


class Begun(NamedTuple):
    """Where a step stands that can be paused. A pytree of device arrays.

    Attributes:
        partway: in the layers.
        pending: as in Forwarded.
        knows_tokens: whether both are those of its tokens. It does not as long as the step before
            it has to choose some of them; and after other steps the device no longer does.
        serial: the number with which it goes on; 0: that with which it began.
    """

    partway: Partway
    pending: Int[Array, "S"]
    knows_tokens: Bool[Array, ""]
    serial: Int[Array, ""] | np.int32

    @classmethod
    def nothing(cls, layout: BatchLayout, width: int) -> "Begun":
        """Return where a step of a bucket stands before its first layer; `width` of the stream."""
        stream = jnp.zeros((layout.bucket.num_tokens, width), jnp.float32)
        pending = jnp.zeros(layout.bucket.num_seqs, jnp.int32)
        return cls(Partway(stream, jnp.int32(0)), pending, jnp.bool_(False), jnp.int32(0))


type Weights = list[Array]
type Forward = Callable[
    [Weights, KVCache, Int[Array, "R"], Int[Array, "_"]],
    tuple[KVCache, Forwarded, Int[Array, "T F"]],
]
type GoOn = Callable[
    [Weights, KVCache, Int[Array, "R"], Int[Array, "_"], Begun],
    tuple[KVCache, Forwarded, Int[Array, "T F"], Begun],
]
type Choose = Callable[
    [Weights, Int[Array, "R"], Forwarded, RuleArrays],
    tuple[Int[Array, "R"], Int[Array, "S"], Int[Array, "S F"]],
]

type Steps = Callable[
    [Weights, KVCache, Int[Array, "R"], Int[Array, "K _"], RuleArrays],
    tuple[KVCache, Int[Array, "R"], Int[Array, "K S"]],
]


def make_forward(
    graph: nnx.GraphDef[Decoder], tree: jax.tree_util.PyTreeDef, layout: BatchLayout
) -> Forward:
    """Return one bucket's way through the layers, to be compiled with the cache donated.

    Args:
        graph: of the decoder.
        tree: of its weights, whose leaves are the first argument.
        layout: of the bucket.
    """

    def forward(
        weights: Weights, kv_cache: KVCache, last_token: Int[Array, "R"], packed: Int[Array, "_"]
    ) -> tuple[KVCache, Forwarded, Int[Array, "T F"]]:
        decoder = nnx.merge(graph, jax.tree.unflatten(tree, weights))
        batch = layout.unpack(packed)
        token_ids_T = pick_token_ids(batch.token_ids, last_token)
        hidden_TD, kv_cache = decoder(
            token_ids_T,
            batch.positions,
            kv_cache,
            batch.attention,
            num_slots=batch.num_slots,
            decode_only=layout.bucket.decode_only,
        )
        pending_S = _pending(batch, token_ids_T)
        forwarded = Forwarded(hidden_TD[batch.sample_indices], pending_S, _choice(layout, packed))
        return kv_cache, forwarded, _prompt_logprobs(decoder, layout, batch, hidden_TD)

    return forward


def make_go_on(
    graph: nnx.GraphDef[Decoder], tree: jax.tree_util.PyTreeDef, layout: BatchLayout
) -> GoOn:
    """Return one bucket's way through the layers that are left; as `make_forward` does.

    If the step is paused, it chooses and remembers no tokens: what is forwarded wants none.
    """

    def go_on(
        weights: Weights,
        kv_cache: KVCache,
        last_token: Int[Array, "R"],
        packed: Int[Array, "_"],
        begun: Begun,
    ) -> tuple[KVCache, Forwarded, Int[Array, "T F"], Begun]:
        decoder = nnx.merge(graph, jax.tree.unflatten(tree, weights))
        batch = layout.unpack(packed)
        token_ids_T = pick_token_ids(batch.token_ids, last_token)
        stream_TD, layer = begun.partway
        begins = ~begun.knows_tokens & (layer == 0)
        pending_S = jnp.where(begins, _pending(batch, token_ids_T), begun.pending)
        partway, kv_cache = decoder.go_on(
            Partway(jnp.where(begins, decoder.embed(token_ids_T), stream_TD), layer),
            batch.positions,
            kv_cache,
            batch.attention,
            num_slots=batch.num_slots,
            serial=jnp.where(begun.serial == 0, batch.serial, begun.serial),
        )
        is_over = partway.layer == decoder.config.num_layers
        hidden_TD = partway.stream
        spare_row = last_token.shape[0] - 1
        choice = layout.choice.keep_rows(_choice(layout, packed), is_over, spare_row=spare_row)
        forwarded = Forwarded(hidden_TD[batch.sample_indices], pending_S, choice)
        batch = batch._replace(any_targets=batch.any_targets & is_over)
        logprobs_TF = _prompt_logprobs(decoder, layout, batch, hidden_TD)
        return kv_cache, forwarded, logprobs_TF, begun._replace(partway=partway, pending=pending_S)

    return go_on


def _pending(batch: ScheduledBatch, token_ids_T: Int[Array, "T"]) -> Int[Array, "S"]:
    ends_S = batch.sample_indices
    return jnp.where(batch.token_ids[ends_S] < 0, token_ids_T[ends_S], -1)


def _choice(layout: BatchLayout, packed: Int[Array, "_"]) -> Int[Array, "_"]:
    return packed[-layout.choice.size :]


def _prompt_logprobs(
    decoder: Decoder, layout: BatchLayout, batch: ScheduledBatch, hidden_TD: Float[Array, "T D"]
) -> Int[Array, "T F"]:
    """Return those of the tokens that are targets, if there are some."""
    nothing = jnp.zeros((*batch.targets.shape, NUM_FIELDS), jnp.int32)
    if not nothing.size:
        return nothing
    logprobs_TF: Int[Array, "T F"] = lax.cond(
        batch.any_targets,
        lambda: prompt_logprobs(
            hidden_TD, batch.targets, decoder.logits, chunk=layout.bucket.num_seqs
        ),
        lambda: nothing,
    )
    return logprobs_TF


def make_choose(
    graph: nnx.GraphDef[Decoder],
    tree: jax.tree_util.PyTreeDef,
    layout: ChoiceLayout,
    *,
    native: bool = False,
) -> Choose:
    """Return how tokens are chosen for a number of sequences.

    Args:
        graph: of the decoder.
        tree: of its weights, whose leaves are the first argument.
        layout: of `Forwarded.packed`.
        native: as of `sample`.
    """

    def choose(
        weights: Weights,
        last_token: Int[Array, "R"],
        forwarded: Forwarded,
        rules: RuleArrays,
    ) -> tuple[Int[Array, "R"], Int[Array, "S"], Int[Array, "S F"]]:
        decoder = nnx.merge(graph, jax.tree.unflatten(tree, weights))
        batch = layout.unpack(forwarded.packed)
        # Nothing is sampled for the spare row, which is the last one. Drafts have one beyond it.
        wanted_S = batch.rows != last_token.shape[0] - 1

        def compute_logits() -> Array:
            return decoder.logits(forwarded.hidden, wanted_S=wanted_S)

        def from_logits() -> tuple[Array, Array]:
            return next_tokens(
                compute_logits(),
                batch,
                rules,
                forwarded.pending,
                compute_logits=compute_logits,
                wanted_S=wanted_S,
                native=native,
            )

        def largest() -> tuple[Array, Array]:
            nothing = jnp.zeros((len(wanted_S), NUM_FIELDS), jnp.int32)
            return decoder.pick_tokens(forwarded.hidden, wanted_S=wanted_S), nothing

        if decoder.can_pick_tokens:
            sampled_S, logprobs_SF = lax.cond(batch.takes_largest, largest, from_logits)
        else:
            sampled_S, logprobs_SF = from_logits()
        last_token = last_token.at[batch.rows].set(sampled_S, mode="drop")
        return last_token, sampled_S, logprobs_SF

    return choose


def make_steps(forward: Forward, choose: Choose) -> Steps:
    """Return several steps after each other, to be compiled with the cache donated.

    Of their results only the sampled tokens come out.

    Args:
        forward: of a bucket.
        choose: of as many sequences.
    """

    def steps(
        weights: Weights,
        kv_cache: KVCache,
        last_token: Int[Array, "R"],
        packed: Int[Array, "K _"],
        rules: RuleArrays,
    ) -> tuple[KVCache, Int[Array, "R"], Int[Array, "K S"]]:
        def step(
            state: tuple[KVCache, Int[Array, "R"]], packed: Int[Array, "_"]
        ) -> tuple[tuple[KVCache, Int[Array, "R"]], Int[Array, "S"]]:
            kv_cache, last_token = state
            kv_cache, forwarded, _ = forward(weights, kv_cache, last_token, packed)
            last_token, sampled, _ = choose(weights, last_token, forwarded, rules)
            return (kv_cache, last_token), sampled

        (kv_cache, last_token), sampled = lax.scan(step, (kv_cache, last_token), packed)
        return kv_cache, last_token, sampled

    return steps
