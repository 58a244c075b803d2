"""The choice of the next token of each row, on CPUs; `native_source/sampling.cc` says how.

XLA draws in passes over all rows and the whole vocabulary, in one thread; top-p took half a second
for 64 rows of 49,152 logits, against some milliseconds here (docs/decisions/0025).

Letters: S rows, V vocabulary.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

__all__ = ["SAMPLE", "sample"]

SAMPLE = "headrace_sample"


def sample(
    logits_SV: Float[Array, "S V"],
    *,
    temperature_S: Float[Array, "S"],
    top_k_S: Int[Array, "S"],
    top_p_S: Float[Array, "S"],
    min_p_S: Float[Array, "S"],
    uniform_S: Float[Array, "S"],
    wanted_S: Bool[Array, "S"],
) -> Int[Array, "S"]:
    """Return a token for each row, which depends on nothing but the row.

    `native.load` must have been called.

    Args:
        logits_SV: in f32.
        temperature_S: 0 for the first largest logit.
        top_k_S: how many of the likeliest tokens are kept, and those that tie with the last; 0 or
            the whole vocabulary for all.
        top_p_S: of what top-k keeps, the share of probability that the fewest of them reach which
            are kept; 1 for all.
        min_p_S: the least probability that is kept, as a share of the largest; 0 for any.
        uniform_S: from [0, 1): where in their cumulative distribution the tokens are drawn.
        wanted_S: rows that are looked at; others get 0.
    """
    call = jax.ffi.ffi_call(SAMPLE, jax.ShapeDtypeStruct(logits_SV.shape[:1], jnp.int32))
    token_ids_S: Array = call(
        logits_SV,
        temperature_S,
        top_k_S,
        top_p_S,
        min_p_S,
        uniform_S,
        wanted_S.astype(jnp.int32),
    )
    return token_ids_S
