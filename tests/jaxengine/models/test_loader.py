import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine_builder import CodedCheckpoint, RandomCheckpoint
from jaxengine.errors import ModelError
from jaxengine.models.config import ModelConfig
from jaxengine.models.loader import load_decoder
from kernels_pallas import fp8
from kernels_pallas.group_codes import GroupCodes, pack_codes
from kernels_pallas.int8 import quantize
from kernels_pallas.projection import pack


class ChangedCheckpoint(RandomCheckpoint):
    """A checkpoint in which some tensors are missing or have another shape."""

    def __init__(self, shapes):
        super().__init__()
        self.shapes |= shapes
        self.shapes = {name: shape for name, shape in self.shapes.items() if shape is not None}


def load(checkpoint, dtype="float32", **arguments):
    model = ModelConfig.from_hf(checkpoint.hf_config)
    return load_decoder(model, checkpoint, dtype=dtype, **arguments)


def test_tensors_go_where_their_names_say_and_join_by_rows():
    checkpoint = RandomCheckpoint(model_type="qwen2", tie_word_embeddings=False)
    decoder = load(checkpoint)
    layer, prefix = decoder.layers[1], "model.layers.1."

    def joined(*names):
        return np.concatenate([checkpoint.get(prefix + name) for name in names])

    for ours, theirs in [
        (decoder.embedding, checkpoint.get("model.embed_tokens.weight")),
        (decoder.lm_head.weight, checkpoint.get("lm_head.weight")),
        (decoder.norm.scale, checkpoint.get("model.norm.weight")),
        (
            layer.attention.qkv_proj.weight,
            joined(*(f"self_attn.{part}_proj.weight" for part in "qkv")),
        ),
        (
            layer.attention.qkv_proj.bias,
            joined(*(f"self_attn.{part}_proj.bias" for part in "qkv")),
        ),
        (layer.attention.o_proj.weight, joined("self_attn.o_proj.weight")),
        (layer.mlp.gate_up_proj.weight, joined("mlp.gate_proj.weight", "mlp.up_proj.weight")),
        (layer.mlp.down_proj.weight, joined("mlp.down_proj.weight")),
        (layer.input_norm.scale, joined("input_layernorm.weight")),
        (layer.post_attention_norm.scale, joined("post_attention_layernorm.weight")),
    ]:
        np.testing.assert_array_equal(ours[...], theirs)


def test_packed_matrices_are_those_of_the_checkpoint_in_another_order():
    checkpoint = RandomCheckpoint(vocab_size=320)
    plain = load(checkpoint, dtype="bfloat16")
    packed = load(checkpoint, dtype="bfloat16", packed=True)
    assert plain.lm_head is None
    for ours, theirs in [
        (packed.lm_head.weight[0], plain.embedding),
        *(
            (packed.stack.attention.qkv_proj.weight[index], layer.attention.qkv_proj.weight)
            for index, layer in enumerate(plain.layers)
        ),
        (packed.stack.mlp.down_proj.weight[1], plain.layers[1].mlp.down_proj.weight),
    ]:
        expected = np.empty_like(ours)
        pack(np.asarray(theirs[...]), expected)
        np.testing.assert_array_equal(ours, expected)
    np.testing.assert_array_equal(packed.embedding[...], plain.embedding[...])


def test_vectors_of_layers_in_a_stack_lie_side_by_side():
    checkpoint = RandomCheckpoint(model_type="qwen2", vocab_size=320)
    plain = load(checkpoint, dtype="bfloat16")
    packed = load(checkpoint, dtype="bfloat16", packed=True)
    assert packed.stack.attention.qkv_proj.bias.shape[0] == len(plain.layers) > 1
    for index, layer in enumerate(plain.layers):
        np.testing.assert_array_equal(
            packed.stack.attention.qkv_proj.bias[index], layer.attention.qkv_proj.bias[...]
        )
        np.testing.assert_array_equal(
            packed.stack.input_norm.scale[index], layer.input_norm.scale[...]
        )


def test_a_matrix_of_odd_size_is_not_packed_and_a_tied_one_then_not_doubled():
    packed = load(RandomCheckpoint(vocab_size=300), dtype="bfloat16", packed=True)
    assert packed.lm_head is None
    untied = RandomCheckpoint(vocab_size=300, tie_word_embeddings=False)
    head = load(untied, dtype="float32", packed=True).lm_head
    np.testing.assert_array_equal(head.weight[...], untied.get("lm_head.weight"))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_quantized_matrices_are_those_of_the_checkpoint_and_the_embedding_stays(packed, tied):
    checkpoint = RandomCheckpoint(
        vocab_size=320, intermediate_size=128, tie_word_embeddings=tied, model_type="qwen2"
    )
    decoder = load(checkpoint, dtype="bfloat16", packed=packed, quantization="int8")
    embedding = checkpoint.get("model.embed_tokens.weight")
    head = embedding if tied else checkpoint.get("lm_head.weight")
    for linear, layer, matrix in [
        (decoder.lm_head, 0, head),
        *(
            ((decoder.stack or decoder.layers[index]).mlp.down_proj, index, matrix)
            for index in range(2)
            for matrix in [checkpoint.get(f"model.layers.{index}.mlp.down_proj.weight")]
        ),
    ]:
        values, scales = quantize(matrix)
        weight, found = linear.weight[...], linear.weight_scale[...]
        assert weight.dtype == jnp.int8
        if packed:
            expected = np.empty_like(weight[layer])
            pack(values, expected)
            np.testing.assert_array_equal(weight[layer], expected)
        else:
            np.testing.assert_array_equal(weight, values)
        np.testing.assert_array_equal(found if found.ndim == 1 else found[layer], scales)
    assert (decoder.stack is None) == (not packed)
    np.testing.assert_array_equal(decoder.embedding[...], embedding.astype(jnp.bfloat16))


@pytest.mark.parametrize("tied", [False, True])
def test_eight_bit_floats_are_never_packed_and_leave_the_head_as_it_is(tied):
    checkpoint = RandomCheckpoint(
        vocab_size=300, intermediate_size=128, tie_word_embeddings=tied, model_type="qwen2"
    )
    decoder = load(checkpoint, dtype="bfloat16", packed=True, quantization="fp8")
    for index, layer in enumerate(decoder.layers):
        values, scales = fp8.quantize(checkpoint.get(f"model.layers.{index}.mlp.down_proj.weight"))
        linear = layer.mlp.down_proj
        assert linear.weight[...].dtype == jnp.float8_e4m3fn
        np.testing.assert_array_equal(
            linear.weight[...].astype("float32"), values.astype("float32")
        )
        np.testing.assert_array_equal(linear.weight_scale[...], scales)
    assert decoder.embedding[...].dtype == jnp.bfloat16
    if tied:
        assert decoder.lm_head is None
    else:
        head = checkpoint.get("lm_head.weight").astype(jnp.bfloat16)
        np.testing.assert_array_equal(decoder.lm_head.weight[...], head)
        assert decoder.lm_head.weight_scale is None
    # A byte for each number of a matrix and four for its row, and for norms and biases; two for
    # each of embedding and head.
    expected = 0
    for name, shape in checkpoint.shapes.items():
        each = 4 if len(shape) == 1 else 1 + 4 / shape[1]
        is_table = name in ("model.embed_tokens.weight", "lm_head.weight")
        expected += math.prod(shape) * (2 if is_table else each)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(decoder)) == expected


def test_matrices_take_the_type_of_the_engine_and_norms_and_biases_stay_f32():
    decoder = load(RandomCheckpoint(model_type="qwen3", attention_bias=True), dtype="bfloat16")
    attention = decoder.layers[0].attention
    assert decoder.embedding.dtype == attention.qkv_proj.weight.dtype == jnp.bfloat16
    norms = (decoder.norm, decoder.layers[0].input_norm, attention.q_norm, attention.k_norm)
    assert {norm.scale.dtype for norm in norms} == {jnp.dtype("float32")}
    assert attention.qkv_proj.bias.dtype == jnp.float32


def test_tied_embeddings_have_no_output_matrix_of_their_own():
    assert load(RandomCheckpoint(tie_word_embeddings=True)).lm_head is None


def test_progress_counts_every_tensor_up_to_the_last():
    seen = []
    load(
        RandomCheckpoint(num_hidden_layers=1),
        progress=lambda done, total: seen.append((done, total)),
    )
    # Embedding and final norm; two norms, qkv, o, gate and up, down.
    assert seen == [(done, 8) for done in range(1, 9)]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {"model.norm.weight": None},
            "the checkpoint lacks 1 tensors, the first is model.norm.weight",
        ),
        (
            {
                "model.layers.0.self_attn.v_proj.weight": None,
                "model.layers.1.mlp.up_proj.weight": None,
            },
            "the checkpoint lacks 2 tensors, the first is model.layers.0.self_attn.v_proj.weight",
        ),
        (
            {"model.embed_tokens.weight": (299, 64)},
            "tensor model.embed_tokens.weight has shape (299, 64), the config says (300, 64)",
        ),
        (
            {"model.layers.1.self_attn.k_proj.weight": (48, 64)},
            "k_proj.weight has shape (48, 64), the config says (32, 64)",
        ),
        (  # the sum of the rows fits
            {
                "model.layers.1.mlp.gate_proj.weight": (90, 64),
                "model.layers.1.mlp.up_proj.weight": (102, 64),
            },
            "gate_proj.weight has shape (90, 64), the config says (96, 64)",
        ),
        (
            {"model.layers.1.self_attn.k_proj.weight": (32, 63)},
            "k_proj.weight has shape (32, 63), the config says (32, 64)",
        ),
        (
            {"model.layers.0.self_attn.o_proj.bias": (64,)},
            "the checkpoint has 1 tensors that its config does not call for, "
            "the first is model.layers.0.self_attn.o_proj.bias",
        ),
        ({"model.norm.weight": (64, 1)}, "tensor model.norm.weight has shape (64, 1)"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(shapes, message):
    with pytest.raises(ModelError) as caught:
        load(ChangedCheckpoint(shapes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"])
def test_tensors_that_repeat_what_is_known_are_passed_over(name):
    load(ChangedCheckpoint({name: (3, 5)}))


def load_coded(checkpoint, **options):
    return load(checkpoint, dtype="bfloat16", codes=checkpoint, **options)


def test_codes_of_matrices_join_by_rows_beside_their_numbers():
    checkpoint = CodedCheckpoint(vocab_size=320, intermediate_size=160, head_dim=64)
    decoder = load_coded(checkpoint, packed=True)
    parts = [
        checkpoint.get_codes(f"model.layers.1.mlp.{name}_proj.weight") for name in ("gate", "up")
    ]
    gate_up = decoder.stack.mlp.gate_up_proj
    place = np.empty(gate_up.codes.shape[1:], np.uint8)
    pack_codes(GroupCodes(*map(np.concatenate, zip(*parts, strict=True))), place)
    np.testing.assert_array_equal(gate_up.codes[1], place)
    numbers = np.empty(gate_up.weight.shape[1:], "bfloat16")
    pack(np.concatenate([part.numbers() for part in parts]), numbers)
    np.testing.assert_array_equal(gate_up.weight[1], numbers)
    head = np.empty(decoder.lm_head.codes.shape[1:], np.uint8)
    pack_codes(checkpoint.get_codes("model.embed_tokens.weight"), head)
    np.testing.assert_array_equal(decoder.lm_head.codes[0], head)


def test_layers_have_codes_if_all_their_matrices_are_stored_in_such_of_the_same_bits():
    class OneOfMoreBits(CodedCheckpoint):
        def code_bits(self, name):
            return (
                8 if name == "model.layers.1.self_attn.v_proj.weight" else super().code_bits(name)
            )

    class OneWithout(CodedCheckpoint):
        def code_bits(self, name):
            return None if name.startswith("model.layers.0.mlp.up") else super().code_bits(name)

    for kind in (OneOfMoreBits, OneWithout):
        decoder = load_coded(kind(vocab_size=320, intermediate_size=160, head_dim=64), packed=True)
        assert decoder.stack.attention.qkv_proj.codes is None
        assert decoder.lm_head.codes is not None


def test_only_packed_weights_have_codes():
    plain = load_coded(CodedCheckpoint(vocab_size=320, intermediate_size=160, head_dim=64))
    assert all(layer.mlp.down_proj.codes is None for layer in plain.layers)
    unasked = load(RandomCheckpoint(vocab_size=320, head_dim=64), dtype="bfloat16", packed=True)
    assert unasked.lm_head.codes is None
