"""The next token of each sequence, chosen on the device.

The choice for a sequence depends on its own logits, parameters, seed and position only, bit by
bit: noise is keyed by (seed, position), and sums are products with ones (see
kernels_pallas.reference on why). Features that no sequence of the batch uses are skipped.

Letters: S sequences, V vocabulary, C candidates.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxengine.batch_layout import SamplingBatch
from jaxengine.models.layers import project, row_sum
from kernels_pallas import native_sampling

__all__ = ["NUM_CANDIDATES", "REMOVED", "sample", "suppress"]

# Most likely tokens that top-k and top-p look at first. Rows that need more take a slower path.
NUM_CANDIDATES = 256

# Below every finite logit; finite itself, so that differences stay finite.
REMOVED = -1e30


def sample(
    logits_SV: Float[Array, "S V"],
    sampling: SamplingBatch,
    *,
    wanted_S: Bool[Array, "S"],
    native: bool,
) -> Int[Array, "S"]:
    """Return one token id per sequence; rows with temperature 0 get their first largest logit.

    It does not look at `suppressed_ids`.

    Args:
        logits_SV: of every sequence.
        sampling: how they are chosen.
        wanted_S: sequences whose token matters.
        native: draw by the native library, which draws from the same distribution, with other
            random numbers.
    """
    if native:
        return native_sampling.sample(
            logits_SV,
            temperature_S=sampling.temperature,
            top_k_S=sampling.top_k,
            top_p_S=sampling.top_p,
            min_p_S=sampling.min_p,
            uniform_S=jax.vmap(_uniform)(sampling.seed, sampling.position),
            wanted_S=wanted_S,
        )
    greedy_S = _first_largest(logits_SV)
    drawn_S = lax.cond(sampling.any_random, lambda: _draw(logits_SV, sampling), lambda: greedy_S)
    return jnp.where(sampling.temperature > 0, drawn_S, greedy_S)


def _first_largest(x_SV: Float[Array, "S V"]) -> Int[Array, "S"]:
    """Return argmax by row, by two plain reductions: XLA's one of pairs is several times slower."""
    is_largest_SV = x_SV == jnp.max(x_SV, axis=-1, keepdims=True)
    ids_V = jnp.arange(x_SV.shape[-1], dtype=jnp.int32)
    # A row of NaN has no largest: any id will do, as long as it is in the vocabulary.
    return jnp.min(jnp.where(is_largest_SV, ids_V, x_SV.shape[-1] - 1), axis=-1)


def suppress(logits_SV: Float[Array, "S V"], ids_SI: Int[Array, "S I"]) -> Float[Array, "S V"]:
    """Return the logits without these ids; -1 stands for none."""
    vocab = logits_SV.shape[-1]
    seqs = jnp.arange(ids_SI.shape[0])[:, None]
    # Unused entries point past the end and are dropped.
    ids_SI = jnp.where(ids_SI < 0, vocab, ids_SI)
    return logits_SV.at[seqs, ids_SI].set(REMOVED, mode="drop")


def _draw(logits_SV: Array, sampling: SamplingBatch) -> Int[Array, "S"]:
    """Draw by the Gumbel-max trick: argmax(logits + noise) follows softmax(logits)."""
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    logits_SV = logits_SV / temperature[:, None]
    logits_SV = lax.cond(
        sampling.any_filtered,
        lambda: jnp.where(_keep(logits_SV, sampling), logits_SV, REMOVED),
        lambda: logits_SV,
    )
    noise_SV = jax.vmap(_noise, in_axes=(0, 0, None))(
        sampling.seed, sampling.position, logits_SV.shape[-1]
    )
    return _first_largest(logits_SV + noise_SV)


def _noise(seed: Int[Array, "2"], position: Int[Array, ""], vocab: int) -> Float[Array, "V"]:
    return jax.random.gumbel(_key(seed, position), (vocab,), jnp.float32)


def _uniform(seed: Int[Array, "2"], position: Int[Array, ""]) -> Float[Array, ""]:
    """Return the middle of one of 2^23 equal parts: 0 would draw the first token there is."""
    return jax.random.uniform(_key(seed, position), (), jnp.float32) + 2.0**-24


def _key(seed: Int[Array, "2"], position: Int[Array, ""]) -> Array:
    key = jax.random.wrap_key_data(seed.astype(jnp.uint32), impl="threefry2x32")
    return jax.random.fold_in(key, position)


def _keep(logits_SV: Array, sampling: SamplingBatch) -> Bool[Array, "S V"]:
    """Apply top-k, then top-p to what is left, then min-p; ties with the last one kept stay.

    All three keep the tokens above a threshold. The thresholds come from the C most likely
    tokens where these suffice, else from a bisection over all tokens; either way by row, so that
    a row's result does not depend on which path its neighbours take.
    """
    num_candidates = min(NUM_CANDIDATES, logits_SV.shape[-1])
    candidates_SC = lax.top_k(logits_SV, num_candidates)[0]
    top_S = candidates_SC[:, 0]
    needs_k = (sampling.top_k > 0) & (sampling.top_k < logits_SV.shape[-1])
    needs_p = (sampling.top_p < 1) & (sampling.temperature > 0)  # greedy rows hold zeros

    kth_S = jnp.take_along_axis(
        candidates_SC, jnp.clip(sampling.top_k - 1, 0, num_candidates - 1)[:, None], axis=1
    )[:, 0]
    beyond_k = needs_k & (sampling.top_k > num_candidates)
    kth_S = lax.cond(
        jnp.any(beyond_k),
        lambda: jnp.where(beyond_k, _kth_largest(logits_SV, sampling.top_k), kth_S),
        lambda: kth_S,
    )
    threshold_S = jnp.where(needs_k, kth_S, REMOVED)

    def mass(x: Array) -> Array:
        """Unnormalised probabilities of the tokens that top-k keeps."""
        return jnp.where(x >= threshold_S[:, None], jnp.exp(x - top_S[:, None]), 0.0)

    def with_top_p() -> Array:
        wanted_S = sampling.top_p * row_sum(mass(logits_SV))
        # Mass of the c most likely tokens, c = 1 .. C.
        lower_CC = jnp.tril(jnp.ones((num_candidates, num_candidates), jnp.float32))
        reached_SC = project(mass(candidates_SC), lower_CC) >= wanted_S[:, None]
        found_S = reached_SC[:, -1]
        smallest_S = jnp.take_along_axis(
            candidates_SC, jnp.argmax(reached_SC, axis=-1)[:, None], axis=1
        )[:, 0]
        beyond_p = needs_p & ~found_S
        smallest_S = lax.cond(
            jnp.any(beyond_p),
            lambda: jnp.where(
                beyond_p, _smallest_of_mass(logits_SV, mass(logits_SV), wanted_S), smallest_S
            ),
            lambda: smallest_S,
        )
        return jnp.where(needs_p, jnp.maximum(threshold_S, smallest_S), threshold_S)

    threshold_S = lax.cond(jnp.any(needs_p), with_top_p, lambda: threshold_S)
    min_p_S = top_S + jnp.log(jnp.maximum(sampling.min_p, 1e-30))
    threshold_S = jnp.maximum(threshold_S, jnp.where(sampling.min_p > 0, min_p_S, REMOVED))
    return logits_SV >= threshold_S[:, None]


def _kth_largest(x_SV: Float[Array, "S V"], k_S: Int[Array, "S"]) -> Float[Array, "S"]:
    """Return the k-th largest value of each row, found bit by bit from the top."""

    def at_least_k(threshold_S: Array) -> Array:
        return jnp.sum(_sortable(x_SV) >= threshold_S[:, None], axis=-1) >= k_S

    return _bisect(at_least_k, x_SV.shape[0])


def _smallest_of_mass(
    x_SV: Float[Array, "S V"], mass_SV: Float[Array, "S V"], wanted_S: Float[Array, "S"]
) -> Float[Array, "S"]:
    """Return the largest threshold above which the tokens of each row hold the wanted mass."""

    def holds_mass(threshold_S: Array) -> Array:
        above = _sortable(x_SV) >= threshold_S[:, None]
        return row_sum(jnp.where(above, mass_SV, 0.0)) >= wanted_S

    return _bisect(holds_mass, x_SV.shape[0])


def _sortable(x: Float[Array, "*B"]) -> Int[Array, "*B"]:
    """Map floats to unsigned integers in the same order."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits & sign, ~bits, bits | sign)


def _bisect(holds: Callable[[Array], Array], num_rows: int) -> Float[Array, "S"]:
    """Return the largest float at which a monotone predicate still holds, per row."""

    def set_bit(index: Array, found_S: Array) -> Array:
        candidate_S = found_S | (jnp.uint32(1 << 31) >> index.astype(jnp.uint32))
        return jnp.where(holds(candidate_S), candidate_S, found_S)

    found_S = lax.fori_loop(0, 32, set_bit, jnp.zeros(num_rows, jnp.uint32))
    sign = jnp.uint32(1 << 31)
    bits = jnp.where(found_S & sign, found_S & ~sign, ~found_S)
    return lax.bitcast_convert_type(bits, jnp.float32)
