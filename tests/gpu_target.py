"""GPUs that are not there: what a kernel or a step is lowered and compiled for.

Lowering needs JAX alone. Compiling needs JAX's CUDA plugin, which then compiles for a described
GPU as for a real one, down to machine code. It needs no driver and no GPU.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)

from kernels_pallas.kv_cache import KVCache
from kernels_pallas.ragged_paged_attention import ragged_paged_attention, write_kv
from kernels_pallas.work_plan import AttentionBatch, max_decode_splits, max_prefill_tiles

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


def layer_step(
    kv_cache: KVCache,
    *,
    num_seqs: int = 8,
    num_tokens: int = 8,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A layer's write and attention, and the shapes of its arguments.

    Four query heads share a kv head. With as many tokens as sequences there are only decodes.
    """

    def ints(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.int32)

    def floats(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    batch = AttentionBatch(
        slot_mapping=ints(num_tokens),
        query_start_loc=ints(num_seqs + 1),
        seq_lens=ints(num_seqs),
        block_tables=ints(num_seqs, 64),
        num_decodes=ints(),
        prefill_tiles=ints(max_prefill_tiles(num_tokens, num_seqs), 4),
        num_prefill_tiles=ints(),
        decode_splits=ints(max_decode_splits(num_seqs), 3),
        split_starts=ints(num_seqs + 1),
    )
    if sliding_window is not None:
        most = max_decode_splits(num_seqs, sliding_window=sliding_window)
        batch = batch._replace(window_splits=ints(most, 3), window_split_starts=ints(num_seqs + 1))
    num_kv_heads, head_dim = kv_cache.data.shape[2], kv_cache.data.shape[4]

    def step(q: Array, kv_cache: KVCache, batch: AttentionBatch, new: Array) -> Any:
        kv_cache = write_kv(kv_cache, new, new, batch.slot_mapping, first_block=jnp.int32(0))
        out = ragged_paged_attention(
            q,
            kv_cache,
            batch,
            first_block=jnp.int32(0),
            num_kv_heads=num_kv_heads,
            scale=0.1,
            decode_only=num_tokens == num_seqs,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
        return out, kv_cache

    q = floats(num_tokens, 4 * num_kv_heads, head_dim)
    return step, (q, kv_cache, batch, floats(num_tokens, num_kv_heads, head_dim))


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
    kind: str,
    function: Callable[..., Any],
    *shapes: Any,
    donate: tuple[int, ...] = (),
    mesh: Mesh | None = None,
    use_library: bool = False,
) -> jax.stages.Compiled:
    """Compile to machine code of such a GPU; registers that spill are an error.

    Needs the CUDA plugin on the path, and JAX_PLATFORMS=cpu.

    Args:
        kind: of the GPU, a key of GPUS.
        function: what to compile.
        shapes: of its arguments.
        donate: which of these are donated.
        mesh: of several such GPUs, on which the shapes say how they lie.
        use_library: products are cuBLASLt's, not kernels of XLA's own.
    """
    if mesh is None:
        mesh = Mesh(described_gpus(kind, 1), ("x",))
        everywhere = NamedSharding(mesh, PartitionSpec())
        jitted = jax.jit(
            function, in_shardings=everywhere, out_shardings=everywhere, donate_argnums=donate
        )
    else:
        jitted = jax.jit(function, donate_argnums=donate)
    with on_mesh(mesh):
        lowered = jitted.lower(*shapes)
    return lowered.compile(
        {
            # There is nothing to measure on: the same choices every time.
            "xla_gpu_autotune_level": 0,
            "xla_gpu_enable_triton_gemm": not use_library,
            "xla_gpu_fail_ptx_compilation_on_register_spilling": True,
        }
    )


def on_mesh(mesh: Mesh) -> AbstractContextManager[Any]:
    """Tell the kernels which GPU it is."""
    return use_abstract_mesh(mesh.abstract_mesh)


@cache
def described_gpus(kind: str, number: int) -> Sequence[jax.Device]:
    """Return such GPUs of one host, to compile for; needs what `compile_for` does."""
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name=kind,
        target_config=_target_config(GPUS[kind]),
        topology=f"1x1x{number}",  # partitions, hosts of each, devices of each
    )
    devices: Sequence[jax.Device] = topology.devices
    return devices


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
