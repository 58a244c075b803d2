"""GPUs that are not there: what a kernel or a step is lowered and compiled for.

Lowering needs JAX alone. Compiling needs JAX's CUDA plugin, which then compiles for a described
GPU as for a real one, down to machine code. It needs no driver and no GPU.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)

# Custom calls of the kernels, which `jax.export` wants to be named.
CUSTOM_CALLS = ("__gpu$xla.gpu.triton", "mosaic_gpu_v2")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as its vendor describes it; sizes in bytes unless named otherwise."""

    name: str
    capability: tuple[int, int]
    num_cores: int
    shared_memory: int
    threads_per_core: int
    bandwidth: int
    l2_cache: int
    clock_ghz: float
    memory: int


GPUS = {
    "h200": Gpu(
        name="NVIDIA H200",
        capability=(9, 0),
        num_cores=132,
        shared_memory=232448,
        threads_per_core=2048,
        bandwidth=4_800_000_000_000,
        l2_cache=52428800,
        clock_ghz=1.98,
        memory=151_397_597_184,
    ),
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        num_cores=108,
        shared_memory=166912,
        threads_per_core=2048,
        bandwidth=2_039_000_000_000,
        l2_cache=41943040,
        clock_ghz=1.41,
        memory=85_000_000_000,
    ),
    "l4": Gpu(
        name="NVIDIA L4",
        capability=(8, 9),
        num_cores=58,
        shared_memory=101376,
        threads_per_core=1536,
        bandwidth=300_000_000_000,
        l2_cache=50331648,
        clock_ghz=2.04,
        memory=24_000_000_000,
    ),
}


def lower_for(kind: str, function: Callable[..., Any], *shapes: Any) -> str:
    """Return the program for such a GPU as text, with the kernels in it compiled by JAX."""
    gpu = GPUS[kind]
    device = AbstractDevice(gpu.name, gpu.num_cores, "gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        exported = jax.export.export(
            jax.jit(function),
            platforms=["cuda"],
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(n) for n in CUSTOM_CALLS],
        )(*shapes)
    return exported.mlir_module()


def compile_for(
    kind: str, function: Callable[..., Any], *shapes: Any, donate: tuple[int, ...] = ()
) -> jax.stages.Compiled:
    """Compile to machine code of such a GPU; registers that spill are an error.

    Needs the CUDA plugin on the path, and JAX_PLATFORMS=cpu.
    """
    mesh = _mesh(kind)
    everywhere = NamedSharding(mesh, PartitionSpec())
    with on_mesh(mesh):
        lowered = jax.jit(
            function, in_shardings=everywhere, out_shardings=everywhere, donate_argnums=donate
        ).lower(*shapes)
    return lowered.compile(
        {
            # There is nothing to measure on: the same choices every time.
            "xla_gpu_autotune_level": 0,
            "xla_gpu_fail_ptx_compilation_on_register_spilling": True,
        }
    )


def on_mesh(mesh: Mesh) -> AbstractContextManager[Any]:
    """Tell the kernels which GPU it is."""
    return use_abstract_mesh(mesh.abstract_mesh)


@cache
def _mesh(kind: str) -> Mesh:
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name=kind,
        target_config=_target_config(GPUS[kind]),
        topology="1x1x1",
    )
    return topologies.make_mesh(topology, (1,), ("x",))


def _target_config(gpu: Gpu) -> str:
    """Return the description in XLA's format.

    Without driver and runtime versions XLA leaves library calls out of CUDA graphs.
    """
    major, minor = gpu.capability
    features = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory + 1024}
  shared_memory_per_block_optin: {gpu.shared_memory}
  threads_per_core_limit: {gpu.threads_per_core}
  core_count: {gpu.num_cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: {gpu.l2_cache}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  name: "{gpu.name}"
  device_address_bits: 64
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{gpu.name}"
"""
