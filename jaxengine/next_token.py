"""From logits to the next token of each sequence, and how likely it was.

Nothing that no sequence of the step has asked for is computed, and the logits are not copied for
it either: what changes them works in place, because nobody needs them as they were. The few who
do (log-probabilities together with biases or penalties) compute them once more.

Letters: S sequences, V vocabulary, F as in jaxengine.logprobs.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxengine.batch_layout import ChoiceBatch
from jaxengine.logit_rules import apply_rules
from jaxengine.logprobs import NUM_FIELDS, likeliest, with_tokens
from jaxengine.rule_arrays import RuleArrays
from jaxengine.sampling import sample, suppress

__all__ = ["next_tokens"]


def next_tokens(
    logits_SV: Float[Array, "S V"],
    batch: ChoiceBatch,
    arrays: RuleArrays,
    pending_S: Int[Array, "S"],
    *,
    compute_logits: Callable[[], Array],
    wanted_S: Bool[Array, "S"],
    native: bool,
) -> tuple[Int[Array, "S"], Int[Array, "S F"]]:
    """Return a token for each sequence, and its log-probabilities (zeros if nobody wants any).

    Args:
        logits_SV: the model's.
        batch: how they are chosen.
        arrays: rules of the sequences.
        pending_S: the last token of each sequence that the host does not know; -1 if it does.
        compute_logits: returns `logits_SV` once more.
        wanted_S: as of `sample`.
        native: likewise.
    """
    num_seqs = logits_SV.shape[0]
    sampling, rules = batch.sampling, batch.rules
    likely_SF = lax.cond(
        batch.any_logprobs,
        lambda: likeliest(logits_SV),
        lambda: jnp.zeros((num_seqs, NUM_FIELDS), jnp.int32),
    )

    def changed() -> Array:
        ruled_SV = apply_rules(logits_SV, rules, arrays, pending_S)
        allowed_SV: Array = lax.cond(
            sampling.any_suppressed,
            lambda: suppress(ruled_SV, sampling.suppressed_ids),
            lambda: ruled_SV,
        )
        return allowed_SV

    any_scores = rules.any_biased | rules.any_penalized
    ruled_SV = lax.cond(
        any_scores | rules.any_masked | sampling.any_suppressed, changed, lambda: logits_SV
    )
    sampled_S = sample(ruled_SV, sampling, wanted_S=wanted_S, native=native)

    def told() -> Array:
        # Masks leave the logit of a token that is sampled in spite of them as it was.
        own_SV = lax.cond(any_scores, compute_logits, lambda: ruled_SV)
        return with_tokens(likely_SF, own_SV, sampled_S)

    return sampled_S, lax.cond(batch.any_logprobs, told, lambda: likely_SF)
