"""Log-probabilities of tokens and of what else was likely, on the device and back on the host.

They are the model's own: of its logits, whatever was done to these before sampling. Each depends
on its own token and context only, bit by bit (sums are products with ones, see models.layers).

On the device a token's are one row of int32: the bits of its log-probability, then K ids, then the
bits of their log-probabilities.

Letters: T packed tokens, S sequences, V vocabulary, D model, K alternatives.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray

from jaxengine.models.layers import row_sum
from jaxengine.outputs import TokenLogprobs
from jaxengine.sampling_params import MAX_LOGPROBS

__all__ = [
    "NUM_FIELDS",
    "likeliest",
    "prompt_logprobs",
    "read_logprobs",
    "token_logprobs",
    "with_tokens",
]

NUM_FIELDS = 1 + 2 * MAX_LOGPROBS


def token_logprobs(
    logits_SV: Float[Array, "S V"], token_ids_S: Int[Array, "S"]
) -> Int[Array, "S F"]:
    """Return the row of each of these tokens."""
    return with_tokens(likeliest(logits_SV), logits_SV, token_ids_S)


def likeliest(logits_SV: Float[Array, "S V"]) -> Int[Array, "S F"]:
    """Return rows that lack their token: the likeliest ones, and the bits of log(sum(exp))."""
    top_S1 = jnp.max(logits_SV, axis=-1, keepdims=True)
    total_S1 = (top_S1[:, 0] + jnp.log(row_sum(jnp.exp(logits_SV - top_S1))))[:, None]
    num_top = min(MAX_LOGPROBS, logits_SV.shape[-1])
    values_SK, ids_SK = lax.top_k(logits_SV, num_top)
    rest = [(0, 0), (0, MAX_LOGPROBS - num_top)]  # of a vocabulary smaller than that
    return jnp.concatenate(
        [
            _bits(total_S1),
            jnp.pad(ids_SK, rest),
            jnp.pad(_bits(values_SK - total_S1), rest),
        ],
        axis=1,
    )


def with_tokens(
    likely_SF: Int[Array, "S F"], logits_SV: Float[Array, "S V"], token_ids_S: Int[Array, "S"]
) -> Int[Array, "S F"]:
    """Return the row of each of these tokens, from what `likeliest` said."""
    total_S1 = lax.bitcast_convert_type(likely_SF[:, :1], jnp.float32)
    chosen_S1 = jnp.take_along_axis(logits_SV, token_ids_S[:, None], axis=1)
    return likely_SF.at[:, :1].set(_bits(chosen_S1 - total_S1))


def prompt_logprobs(
    hidden_TD: Float[Array, "T D"],
    targets_T: Int[Array, "T"],
    logits: Callable[[Array], Array],
    *,
    chunk: int,
) -> Int[Array, "T F"]:
    """Return the row of the target of each token, zeros where that is -1.

    Args:
        hidden_TD: what the layers made of the tokens.
        targets_T: the token whose log-probability after this one is wanted, or -1.
        logits: logits of hidden states.
        chunk: tokens whose logits exist at the same time; chunks without targets cost nothing.
    """
    num_tokens = targets_T.shape[0]
    chunk = min(chunk, num_tokens)
    rest = -num_tokens % chunk
    hidden = jnp.pad(hidden_TD, ((0, rest), (0, 0))).reshape(-1, chunk, hidden_TD.shape[-1])
    targets = jnp.pad(targets_T, (0, rest), constant_values=-1).reshape(-1, chunk)

    def rows(part: tuple[Array, Array]) -> Array:
        hidden_CD, targets_C = part
        found: Array = lax.cond(
            jnp.any(targets_C >= 0),
            lambda: token_logprobs(logits(hidden_CD), jnp.maximum(targets_C, 0)),
            lambda: jnp.zeros((chunk, NUM_FIELDS), jnp.int32),
        )
        return found

    found: Array = lax.map(rows, (hidden, targets))
    return found.reshape(-1, NUM_FIELDS)[:num_tokens]


def read_logprobs(row: NDArray[np.int32], num_top: int) -> TokenLogprobs:
    """Return one row as the host wants it, with so many alternatives."""
    logprob = float(row[:1].view(np.float32)[0])
    ids = row[1 : 1 + num_top].tolist()
    values = row[1 + MAX_LOGPROBS : 1 + MAX_LOGPROBS + num_top].view(np.float32).tolist()
    return TokenLogprobs(logprob, tuple(zip(ids, values, strict=True)))


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)
