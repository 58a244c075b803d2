"""The kernels under `jax.shard_map`: each device with the KV cache of its own heads."""

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from attention_kernels import ready_kernel
from gpu_target import CUSTOM_CALLS, GPUS, layer_step
from kernels_pallas.ragged_paged_attention import new_kv_cache
from many_devices import run_on_devices

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

KERNELS = ("reference", "triton", "native")


@pytest.fixture(scope="module")
def ready():
    """Kernels that work here; triton's are interpreted."""
    return [kernel for kernel in KERNELS if kernel != "native" or ready_kernel() == "native"]


def cache_of(num_kv_heads, kernel):
    sizes = {"num_layers": 1, "num_blocks": 64, "block_size": 16, "head_dim": 128}
    return jax.eval_shape(
        lambda: new_kv_cache(num_kv_heads=num_kv_heads, dtype="bfloat16", kernel=kernel, **sizes)
    )


@pytest.fixture(scope="module")
def two(ready):
    return run_on_devices(2, *(f"attention,{kernel}" for kernel in ready))


@pytest.mark.parametrize("kernel", KERNELS)
def test_devices_with_half_of_the_heads_have_the_bits_of_one_with_all(two, ready, kernel):
    if kernel not in ready:
        pytest.skip("no compiler here")
    assert two[f"attention,{kernel}"]


@pytest.mark.parametrize(
    ("kernel", "call"), [("mosaic_gpu", CUSTOM_CALLS[1]), ("triton", CUSTOM_CALLS[0])]
)
def test_the_kernels_for_gpus_lower_for_two_of_them(kernel, call):
    step, _ = layer_step(cache_of(4, kernel), num_tokens=64)
    _, shapes = layer_step(cache_of(8, kernel), num_tokens=64)
    gpu = GPUS["h200"]
    mesh = AbstractMesh(
        (2,),
        ("tensor",),
        axis_types=(AxisType.Auto,),
        abstract_device=AbstractDevice(gpu.name, gpu.num_cores, "gpu"),
    )
    heads, cache_heads = PartitionSpec(None, "tensor"), PartitionSpec(None, None, "tensor")
    specs = (heads, cache_heads, PartitionSpec(), heads)
    spread = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=specs,
        out_specs=(heads, cache_heads),
        check_vma=False,
    )
    exported = jax.export.export(
        jax.jit(spread, in_shardings=tuple(NamedSharding(mesh, spec) for spec in specs)),
        platforms=["cuda"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(n) for n in CUSTOM_CALLS],
    )(*shapes)
    program = exported.mlir_module()
    # Decodes, their merge, and prompts.
    assert program.count(f"stablehlo.custom_call @{call}") == 3
    assert "all_gather" not in program
    assert exported.nr_devices == 2
