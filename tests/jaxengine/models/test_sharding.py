import jax.numpy as jnp
import numpy as np
import pytest

from engine_builder import HF_CONFIG
from jaxengine.models.config import ModelConfig
from jaxengine.models.sharding import add_up, join_vocabulary, look_up, shard_of

# tests/jaxengine/test_device_mesh.py runs them on several devices.


def model(**changes):
    return ModelConfig.from_hf({**HF_CONFIG, **changes})


def test_a_shard_has_its_part_of_heads_and_mlp_and_all_else_of_the_model():
    shard = shard_of(model(num_attention_heads=8, num_key_value_heads=4), 4)
    assert (shard.num_heads, shard.num_kv_heads, shard.num_shards) == (2, 1, 4)
    assert (shard.intermediate_size, shard.hidden_size) == (24, 64)
    assert (shard.vocab_size, shard.vocab_rows) == (300, 75)


def test_a_vocabulary_that_does_not_divide_is_whole_in_every_shard():
    shard = shard_of(model(vocab_size=301), 4)
    assert (shard.vocab_size, shard.vocab_rows) == (301, 301)


def test_more_shards_than_kv_heads_have_one_each():
    shard = shard_of(model(num_attention_heads=8, num_key_value_heads=2), 8)
    assert (shard.num_heads, shard.num_kv_heads) == (1, 1)


def test_one_shard_is_the_model():
    assert shard_of(model(), 1) == model()


# 9 and 3 heads of 64 are those of SmolLM2-135M.
SMOLLM2 = {
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "intermediate_size": 1536,
}


@pytest.mark.parametrize(
    ("changes", "number", "possible"),
    [
        (SMOLLM2, 2, "1, 3"),
        (SMOLLM2, 6, "1, 3"),
        # Two shards of three kv heads would have one and a half.
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "1"),
        ({"num_attention_heads": 8, "num_key_value_heads": 8}, 16, "1, 2, 4, 8"),
        ({"intermediate_size": 98}, 4, "1, 2"),
        ({"hidden_size": 62, "intermediate_size": 96}, 4, "1, 2"),
    ],
)
def test_a_number_that_does_not_divide_is_refused_and_the_possible_ones_named(
    changes, number, possible
):
    with pytest.raises(ValueError, match=f"tensor_parallel_size {number} does not") as caught:
        shard_of(model(**changes), number)
    assert str(caught.value).endswith(f"possible are {possible}")


def test_with_one_shard_nothing_is_exchanged():
    x = jnp.ones((2, 3))
    assert add_up(x, 1) is x
    assert join_vocabulary(x, model()) is x
    table = jnp.arange(12, dtype=jnp.bfloat16).reshape(4, 3)
    found = look_up(table, jnp.array([3, 0]), model())
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, [[9, 10, 11], [0, 1, 2]])
