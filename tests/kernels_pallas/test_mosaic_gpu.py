"""The kernels of the Mosaic GPU backend, in its interpreter, against float64 numpy.

The interpreter knows threads, barriers and TMA, and finds races. What a GPU adds, its machine code,
is compiled in test_tuning.py. What only running there can show is in `python -m bench.gpu`.
"""

import jax
import jax.numpy as jnp
import pytest

from gpu_target import layer_step, lower_for
from kernels_pallas.mosaic_gpu import attend
from kernels_pallas.ragged_paged_attention import new_kv_cache
from kernels_pallas.tuning import mosaic_config
from mosaic_scenes import error_without_races


def test_seven_heads_that_share_one_in_blocks_larger_than_a_tile():
    assert error_without_races("seven_heads_in_large_blocks") < 2e-3


SIZES = {"num_layers": 1, "num_blocks": 64, "num_kv_heads": 8, "kernel": "mosaic_gpu"}


@pytest.mark.parametrize(
    ("block_size", "head_dim", "num_tokens", "options"),
    [
        (16, 128, 8, {}),
        (8, 64, 64, {}),
        (64, 64, 8, {}),
        (128, 128, 64, {}),
        (16, 128, 64, {"sliding_window": 1000, "soft_cap": 50.0}),
    ],
)
def test_blocks_and_heads_lower_for_hopper(block_size, head_dim, num_tokens, options):
    cache = jax.eval_shape(
        lambda: new_kv_cache(block_size=block_size, head_dim=head_dim, dtype="bfloat16", **SIZES)
    )
    step, shapes = layer_step(cache, num_tokens=num_tokens, **options)
    program = lower_for("h200", step, *shapes)
    assert program.count("stablehlo.custom_call @mosaic_gpu_v2") == (2 if num_tokens == 8 else 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "no cache of int8, only of bfloat16 and float16"),
        ({"block_size": 24}, "block_size 24 must be 8, 16, 32, 64 or 128"),
        ({"head_dim": 256}, "heads of 256 exceed the largest, 128"),
    ],
)
def test_what_the_kernel_does_not_have_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        new_kv_cache(**{**SIZES, "block_size": 16, "head_dim": 64, "dtype": "bfloat16", **changes})


def test_more_query_heads_than_rows_are_refused():
    cache = jax.eval_shape(
        lambda: new_kv_cache(
            **{**SIZES, "num_kv_heads": 1}, block_size=16, head_dim=64, dtype="bfloat16"
        )
    )
    with pytest.raises(ValueError, match="65 query heads for a kv head exceed 64"):
        attend(
            jnp.zeros((8, 65, 64)),
            cache,
            layer_step(cache)[1][2],
            first_block=jnp.int32(0),
            num_kv_heads=1,
            scale=1.0,
            decode=mosaic_config("decode", 64),
            prefill=None,
        )
