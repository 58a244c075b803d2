import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from engine_builder import RandomCheckpoint, decoder_of
from jaxengine.errors import ModelError
from jaxengine.models.config import ModelConfig
from jaxengine.models.loader import load_decoder
from jaxengine.models.shard_loader import ShardSource, load_shards
from jaxengine.models.sharding import AXIS, shard_of

ATTENTION, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."


def shards(checkpoint, number):
    model = ModelConfig.from_hf(checkpoint.hf_config)
    return [
        ShardSource(checkpoint, model, num_shards=number, index=index) for index in range(number)
    ]


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        *((f"{ATTENTION}{part}_proj.weight", 0) for part in "qkv"),
        *((f"{ATTENTION}{part}_proj.bias", 0) for part in "qkv"),
        (f"{ATTENTION}o_proj.weight", 1),
        (f"{MLP}gate_proj.weight", 0),
        (f"{MLP}up_proj.weight", 0),
        (f"{MLP}down_proj.weight", 1),
        ("model.embed_tokens.weight", 0),
        ("lm_head.weight", 0),
    ],
)
def test_the_shards_of_a_tensor_are_all_of_it_in_order(name, axis):
    checkpoint = RandomCheckpoint(model_type="qwen2", tie_word_embeddings=False)
    parts = [source.get(name) for source in shards(checkpoint, 2)]
    assert parts[0].shape == parts[1].shape
    np.testing.assert_array_equal(np.concatenate(parts, axis), checkpoint.get(name))


@pytest.mark.parametrize(
    "name",
    ["model.norm.weight", f"{ATTENTION}q_norm.weight", "model.layers.1.input_layernorm.weight"],
)
def test_norms_are_whole_in_every_shard(name):
    checkpoint = RandomCheckpoint(model_type="qwen3")
    for source in shards(checkpoint, 2):
        np.testing.assert_array_equal(source.get(name), checkpoint.get(name))


def test_shards_that_share_a_kv_head_have_it_beside_the_heads_that_attend_to_it():
    # Query heads 0 to 3 attend to kv head 0, and 4 to 7 to kv head 1; two query heads a shard.
    checkpoint = RandomCheckpoint(num_attention_heads=8, num_key_value_heads=2)
    whole = checkpoint.get(f"{ATTENTION}k_proj.weight")
    for index, source in enumerate(shards(checkpoint, 4)):
        part = source.get(f"{ATTENTION}k_proj.weight")
        head = index // 2
        np.testing.assert_array_equal(part, whole[head * 16 : head * 16 + 16])


def test_a_vocabulary_that_does_not_divide_is_whole():
    checkpoint = RandomCheckpoint(vocab_size=301)
    assert shards(checkpoint, 2)[1].get("model.embed_tokens.weight").shape == (301, 64)


def test_a_tensor_of_another_size_than_the_config_says_is_refused_and_not_cut():
    checkpoint = RandomCheckpoint()
    checkpoint.shapes[f"{MLP}down_proj.weight"] = (64, 100)
    with pytest.raises(ModelError, match=r"down_proj\.weight has shape \(64, 100\), the config"):
        shards(checkpoint, 2)[0].get(f"{MLP}down_proj.weight")


def test_a_shard_has_the_names_of_the_whole():
    checkpoint = RandomCheckpoint()
    assert shards(checkpoint, 2)[1].names() == checkpoint.names()


def test_each_shard_has_scales_of_its_own_for_its_part_of_the_inputs():
    checkpoint = RandomCheckpoint(num_hidden_layers=1)
    model = ModelConfig.from_hf(checkpoint.hf_config)
    x = np.random.default_rng(0).standard_normal((8, model.intermediate_size), np.float32)
    whole = checkpoint.get(f"{MLP}down_proj.weight")
    total, half = np.zeros((8, model.hidden_size)), model.intermediate_size // 2
    for index, source in enumerate(shards(checkpoint, 2)):
        decoder = load_decoder(shard_of(model, 2), source, dtype="float32", quantization="fp8")
        down, inputs = decoder.layers[0].mlp.down_proj, slice(index * half, (index + 1) * half)
        largest = np.abs(whole[:, inputs]).max(axis=1)
        np.testing.assert_allclose(down.weight_scale[...], largest / 448, rtol=1e-6)
        total += down(x[:, inputs])
    # A product is off by 3.7 % of its size on average, and so is a sum of random ones.
    error, exact = total - x @ whole.T.astype(np.float64), x @ whole.T
    assert 0.01 < np.sqrt((error**2).mean() / (exact**2).mean()) < 0.05


def test_a_mesh_of_one_device_loads_what_the_loader_loads():
    checkpoint, seen = RandomCheckpoint(num_hidden_layers=1), []
    expected, model = decoder_of(checkpoint, "bfloat16")
    sharding = NamedSharding(Mesh(jax.devices()[:1], (AXIS,)), PartitionSpec(AXIS))
    decoder = load_shards(
        model,
        checkpoint,
        sharding=sharding,
        dtype="bfloat16",
        progress=lambda done, total: seen.append((done, total)),
    )
    for ours, theirs in zip(jax.tree.leaves(decoder), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert seen == [(done, len(seen)) for done in range(1, len(seen) + 1)]
