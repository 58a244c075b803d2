"""The halves of a layer against NumPy, with all that models differ in, and layers in parts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_kernels import can_project, ready_kernel, ready_library
from kernels_pallas import layer_self_test as layers
from kernels_pallas.choice import KernelUnavailable
from kernels_pallas.layer_self_test import find_layer_fault
from kernels_pallas.native_layer import AttentionWeights, MLPWeights, run_layers
from kernels_pallas.ragged_paged_attention import new_kv_cache


@pytest.fixture(params=["bfloat16", "int8"])
def weight_dtype(request):
    try:
        ready_kernel("native")
    except KernelUnavailable as error:
        pytest.skip(str(error))
    if request.param == "bfloat16" and not can_project():
        pytest.skip("no instructions for bfloat16")
    return request.param


@pytest.mark.parametrize("is_plain", [True, False])
def test_both_halves_are_those_of_numpy(is_plain, weight_dtype):
    assert find_layer_fault(weight_dtype, is_plain=is_plain) is None


def test_a_window_and_a_soft_cap_reach_attention(weight_dtype):
    assert find_layer_fault(weight_dtype, sliding_window=9, soft_cap=2.0) is None


class TwoLayers:
    """Two layers with random weights, and a step of both sequences of the self-test."""

    def __init__(self, weight_dtype):
        rng = np.random.default_rng(0)
        matrix = partial(layers._Matrix, rng, weight_dtype)
        width, hidden, head_dim = layers.WIDTH, layers.HIDDEN, layers.HEAD_DIM
        norm = jnp.ones((2, width))
        qkv = matrix((layers.HEADS + 2 * layers.KV_HEADS) * head_dim, width)
        out = matrix(width, layers.HEADS * head_dim)
        gate_up, down = matrix(2 * hidden, width), matrix(width, hidden)
        self.weights = (
            AttentionWeights(norm, qkv.packed, None, None, None, out.packed),
            MLPWeights(norm, gate_up.packed, down.packed),
        )
        streams = [rng.standard_normal((20, width)) for _ in range(2)]
        before, after = np.array([0, 0]), np.array([5, 20])
        self.x, self.rope, self.batch = layers._step(streams, before, after)
        self._run = jax.jit(
            partial(
                run_layers,
                eps=1e-5,
                scale=head_dim**-0.5,
                sliding_window=None,
                soft_cap=None,
                is_gelu=False,
                adds=True,
            ),
            donate_argnums=4,
        )

    def new_cache(self):
        return new_kv_cache(
            num_layers=2,
            num_blocks=layers.NUM_BLOCKS,
            block_size=layers.BLOCK_SIZE,
            num_kv_heads=layers.KV_HEADS,
            head_dim=layers.HEAD_DIM,
            dtype="bfloat16",
            kernel="native",
        )

    def run(self, x, cache, first, end, *, serial=0):
        out, cache, reached = self._run(
            x,
            *self.weights,
            self.rope,
            cache,
            self.batch,
            jnp.int32(25),
            layers=jnp.array([first, end]),
            serial=jnp.int32(serial),
        )
        return out, cache, int(reached)


def bits(array):
    return np.asarray(array).view(np.uint8)


def test_layers_in_parts_have_the_bits_of_all_at_once(weight_dtype):
    its = TwoLayers(weight_dtype)
    whole, cache, reached = its.run(its.x, its.new_cache(), 0, 2)
    assert reached == 2
    first, parts, reached = its.run(its.x, its.new_cache(), 0, 1)
    assert reached == 1
    assert (bits(first) != bits(whole)).any()
    second, parts, reached = its.run(first, parts, 1, 2)
    assert reached == 2
    np.testing.assert_array_equal(bits(second), bits(whole))
    np.testing.assert_array_equal(bits(parts.data), bits(cache.data))
    nothing, _, reached = its.run(second, parts, 2, 2)
    assert reached == 2
    np.testing.assert_array_equal(bits(nothing), bits(whole))


def test_steps_that_are_paused_and_only_these_end_before_their_first_layer(weight_dtype):
    its, library = TwoLayers(weight_dtype), ready_library("native")
    paused, other, third = (next(library.serials) for _ in range(3))
    library.pause(paused, other)
    for serial in (paused, other):
        stream, cache, reached = its.run(its.x, its.new_cache(), 0, 2, serial=serial)
        assert reached == 0
        np.testing.assert_array_equal(bits(stream), bits(its.x))
        assert not bits(cache.data).any()
    assert its.run(its.x, its.new_cache(), 0, 2, serial=third)[2] == 2
    assert its.run(its.x, its.new_cache(), 0, 2)[2] == 2
    library.pause(third, 0)  # the others may run again
    assert its.run(its.x, its.new_cache(), 0, 2, serial=paused)[2] == 2
