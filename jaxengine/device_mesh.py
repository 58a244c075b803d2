"""The devices that serve together, and how a step and its arrays lie on them.

One device runs a step as it is. Several run it under `jax.shard_map`, each on its own shard of the
model (models.sharding) and its own KV cache of its own heads: no array of these is ever whole
anywhere, and what is joined along the first axis is never looked at as one. All else, inputs and
results, is the same on all devices.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxengine.config import EngineConfig
from jaxengine.kv_cache import DeviceState, new_device_state
from jaxengine.models.config import ModelConfig
from jaxengine.models.sharding import AXIS

__all__ = ["DeviceMesh", "open_mesh"]

SHARDED, SAME = PartitionSpec(AXIS), PartitionSpec()
STATE = DeviceState._make((SHARDED, SAME))  # of the KV cache, and of the last tokens


class DeviceMesh:
    """Devices of one kind, in order; the first one may be all there is."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self.devices = tuple(devices)
        self._mesh = None
        if len(self.devices) > 1:
            self._mesh = Mesh(self.devices, (AXIS,), axis_types=(AxisType.Auto,))

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def weights_sharding(self) -> NamedSharding | None:
        """How weights lie, along their first axis; None on a single device."""
        return None if self._mesh is None else NamedSharding(self._mesh, SHARDED)

    def allocator(self, shard: ModelConfig, config: EngineConfig) -> Callable[[], DeviceState]:
        """Return what allocates an empty state, and compiles nothing from its second call on."""
        allocate = partial(new_device_state, shard, config)
        if self._mesh is None:
            return allocate
        return jax.jit(jax.shard_map(allocate, mesh=self._mesh, in_specs=(), out_specs=STATE))

    def replicate[T](self, arrays: T) -> T:
        """Return a tree of arrays that lie on the first device so that they lie on all."""
        if self._mesh is None:
            return arrays
        replicated: T = jax.device_put(arrays, NamedSharding(self._mesh, SAME))
        return replicated

    def input_of(self, size: int) -> jax.ShapeDtypeStruct:
        """Describe the packed input of a step."""
        sharding = None if self._mesh is None else NamedSharding(self._mesh, SAME)
        return jax.ShapeDtypeStruct((size,), jnp.int32, sharding=sharding)

    def spread[R](
        self, step: Callable[[list[Array], DeviceState, Int[Array, "_"], R], object]
    ) -> Callable[..., object]:
        """Return a step of one shard as one of all devices; it gives (state, results)."""
        if self._mesh is None:
            return step
        # What is the same on all devices is so by construction, which JAX cannot see.
        return jax.shard_map(
            step,
            mesh=self._mesh,
            in_specs=(SHARDED, STATE, SAME, SAME),
            out_specs=(STATE, SAME),
            check_vma=False,
        )


def open_mesh(num_devices: int) -> DeviceMesh:
    """Return a mesh of the first devices that JAX has, those of all processes counted.

    Raises:
        ValueError: there are fewer, or several processes of which some would have none.
    """
    devices = jax.devices()
    if num_devices > len(devices):
        hint = (
            f"; XLA_FLAGS=--xla_force_host_platform_device_count={num_devices} makes as many of "
            "a CPU, to try it"
            if devices[0].platform == "cpu"
            else ""
        )
        raise ValueError(
            f"tensor_parallel_size {num_devices} needs as many devices, but there "
            f"{'is' if len(devices) == 1 else 'are'} {len(devices)} ({devices[0].device_kind})"
            f"{hint}"
        )
    if jax.process_count() > 1 and num_devices != len(devices):
        raise ValueError(
            f"tensor_parallel_size must be {len(devices)}, the devices of all "
            f"{jax.process_count()} processes together, not {num_devices}"
        )
    return DeviceMesh(devices[:num_devices])
