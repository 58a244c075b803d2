"""A layer of few numbers, computed by hand."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.models.config import ModelConfig
from jaxengine.models.decoder_layer import DecoderLayer

GELU_OF_1 = 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * 1.044715))


@pytest.mark.parametrize(
    ("is_gemma2", "activated"), [(False, 1 / (1 + math.exp(-1))), (True, GELU_OF_1)]
)
def test_the_mlp_is_a_gate_times_up(is_gemma2, activated):
    config = ModelConfig(
        family="gemma2" if is_gemma2 else "llama",
        is_gemma2=is_gemma2,
        vocab_size=8,
        hidden_size=2,
        intermediate_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        max_position_embeddings=8,
        rms_norm_eps=0.0,
        rope_theta=1e4,
        tie_embeddings=True,
        eos_token_ids=(0,),
    )
    layer = DecoderLayer(config, dtype=jnp.float32, packed=False)
    # Of (3, 3) the norm makes (1, 1); gate sees the first, up twice the second.
    layer.mlp.gate_up_proj.weight[...] = jnp.array([[1.0, 0.0], [0.0, 2.0]])
    layer.mlp.down_proj.weight[...] = jnp.array([[1.0], [-3.0]])
    out = layer.mlp(jnp.array([[3.0, 3.0]]), norm=layer.post_attention_norm)
    np.testing.assert_allclose(out, [[2 * activated, -6 * activated]], rtol=1e-6)
