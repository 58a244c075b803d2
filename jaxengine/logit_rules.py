"""Rules about tokens, applied to logits on the device: biases, penalties, masks.

What a sequence gets depends on its own logits and rules only, bit by bit: counts are integers,
and everything else is elementwise. Kinds of rules that no sequence has are skipped.

Letters: S sequences, V vocabulary, L positions of a sequence.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxengine.batch_layout import RulesBatch
from jaxengine.rule_arrays import RuleArrays
from jaxengine.sampling import REMOVED
from jaxengine.token_rules import GENERATED

__all__ = ["apply_rules"]

# Positions of a history that are counted together.
COLUMNS_AT_ONCE = 256


def apply_rules(
    logits_SV: Float[Array, "S V"],
    rules: RulesBatch,
    arrays: RuleArrays,
    pending_S: Int[Array, "S"],
) -> Float[Array, "S V"]:
    """Return the logits under the rules: biases first, then penalties, then masks.

    Args:
        logits_SV: the model's.
        rules: of each sequence, and what some sequence needs.
        arrays: more of the rules.
        pending_S: the last token of each sequence that its history lacks; -1 if it lacks none.
    """
    logits_SV = lax.cond(
        rules.any_biased, lambda: _add_biases(logits_SV, arrays.biases), lambda: logits_SV
    )
    logits_SV = lax.cond(
        rules.any_penalized,
        lambda: _penalize(logits_SV, rules, arrays.histories, pending_S),
        lambda: logits_SV,
    )
    masked_SV: Array = lax.cond(
        rules.any_masked, lambda: _mask(logits_SV, arrays.masks), lambda: logits_SV
    )
    return masked_SV


def _add_biases(logits_SV: Array, biases_S2B: Int[Array, "S 2 B"]) -> Array:
    ids_SB = biases_S2B[:, 0]
    values_SB = lax.bitcast_convert_type(biases_S2B[:, 1], jnp.float32)
    seqs = jnp.arange(ids_SB.shape[0])[:, None]
    # Unused entries point past the end and are dropped. No id comes twice.
    ids_SB = jnp.where(ids_SB < 0, logits_SV.shape[-1], ids_SB)
    return logits_SV.at[seqs, ids_SB].add(values_SB, mode="drop")


def _penalize(
    logits_SV: Array, rules: RulesBatch, histories_SL: Int[Array, "S L"], pending_S: Array
) -> Array:
    counts_SV, seen_SV = _count(histories_SL, pending_S, logits_SV.shape[-1])
    repetition_S1 = rules.repetition_penalty[:, None]
    repeated_SV = jnp.where(logits_SV > 0, logits_SV / repetition_S1, logits_SV * repetition_S1)
    # Sequences without rules have zeros.
    logits_SV = jnp.where(seen_SV & (repetition_S1 > 0), repeated_SV, logits_SV)
    off_SV = rules.frequency_penalty[:, None] * counts_SV.astype(jnp.float32)
    logits_SV = jnp.where(counts_SV > 0, logits_SV - off_SV, logits_SV)
    off_S1 = rules.presence_penalty[:, None]
    return jnp.where(counts_SV > 0, logits_SV - off_S1, logits_SV)


def _count(
    histories_SL: Int[Array, "S L"], pending_S: Array, vocab: int
) -> tuple[Int[Array, "S V"], Bool[Array, "S V"]]:
    """Return how often each sequence has generated each token, and whether it has it at all.

    Columns are taken in by chunks, as many as the longest history needs: one request with
    penalties does not make all pay for the longest one that is possible.
    """
    num_seqs, length = histories_SL.shape
    chunk = min(COLUMNS_AT_ONCE, length)
    seqs = jnp.arange(num_seqs)[:, None]

    def take_in(ids_SC: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        counts_SV, seen_SV = found
        # Unused entries point past the end and are dropped.
        tokens_SC = jnp.where(ids_SC < 0, vocab, ids_SC & (GENERATED - 1))
        generated_SC = ((ids_SC >= 0) & ((ids_SC & GENERATED) != 0)).astype(jnp.int32)
        counts_SV = counts_SV.at[seqs, tokens_SC].add(generated_SC, mode="drop")
        return counts_SV, seen_SV.at[seqs, tokens_SC].set(True, mode="drop")

    def take_in_chunk(index: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        first = index * chunk
        start = jnp.minimum(first, length - chunk)  # of the last one, a part was there before
        ids_SC = lax.dynamic_slice_in_dim(histories_SL, start, chunk, axis=1)
        return take_in(jnp.where(start + jnp.arange(chunk) < first, -1, ids_SC), found)

    none = jnp.zeros((num_seqs, vocab), jnp.int32), jnp.zeros((num_seqs, vocab), jnp.bool_)
    found = take_in(jnp.where(pending_S < 0, -1, pending_S | GENERATED)[:, None], none)
    longest = jnp.max(jnp.where(histories_SL >= 0, jnp.arange(1, length + 1), 0))
    counts_SV, seen_SV = lax.fori_loop(0, (longest + chunk - 1) // chunk, take_in_chunk, found)
    return counts_SV, seen_SV


def _mask(logits_SV: Array, masks_SW: Int[Array, "S W"]) -> Array:
    bits = (masks_SW[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    allowed_SV = bits.reshape(masks_SW.shape[0], -1)[:, : logits_SV.shape[-1]] > 0
    return jnp.where(allowed_SV, logits_SV, REMOVED)
