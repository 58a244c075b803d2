"""That a decoder computes a text alike, however it is cut."""

import jax
import numpy as np

from engine_builder import Computed


def check_bits(decoder, model, kv_cache_dtype):
    """Logits and cache of a text that is computed whole, token by token, and in other pieces."""
    token_ids = np.random.default_rng(1).integers(0, model.vocab_size, 150).tolist()

    def compute(cut, **bucket):
        computed = Computed(decoder, model, kv_cache_dtype, max_len=160)
        logits, start = [], 0
        for size in cut:
            logits.append(computed.step(token_ids[start : start + size], start, **bucket))
            start += size
        # Block 0 of each layer takes the padding; nobody reads it.
        arrays = [
            np.asarray(array.astype("float32")).reshape(model.num_layers, -1, *array.shape[1:])
            for array in jax.tree.leaves(computed.kv_cache)
        ]
        return np.concatenate(logits), [array[:, 1:] for array in arrays]

    whole = compute([150], num_tokens=160, num_seqs=8)
    for cut, bucket in [
        ([1] * 150, {"num_tokens": 8, "num_seqs": 8}),
        ([64, 1, 1, 3, 65, 16], {"num_tokens": 100, "num_seqs": 20}),
    ]:
        logits, cache = compute(cut, **bucket)
        np.testing.assert_array_equal(logits, whole[0])
        for array, expected in zip(cache, whole[1], strict=True):
            np.testing.assert_array_equal(array, expected)
