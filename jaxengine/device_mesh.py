"""The devices that serve together, and how a step and its arrays lie on them.

One device runs a step as it is. Several run it under `jax.shard_map`, each on its own shard of the
model (models.sharding) and its own KV cache of its own heads: no array of these is ever whole
anywhere, and what is joined along the first axis is never looked at as one. All else, inputs and
results, is the same on all devices.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxengine.config import EngineConfig
from jaxengine.kv_cache import DeviceState, new_device_state
from jaxengine.models.config import ModelConfig
from jaxengine.models.sharding import AXIS
from jaxengine.step_programs import Choose, Forward

__all__ = ["DeviceMesh", "open_mesh"]

SHARDED, SAME = PartitionSpec(AXIS), PartitionSpec()


class DeviceMesh:
    """Devices of one kind that serve one model; the first one may be all there is."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self.devices = tuple(devices)
        self._mesh = None
        if len(self.devices) > 1:
            self._mesh = Mesh(self.devices, (AXIS,), axis_types=(AxisType.Auto,))
        self._allocate: Callable[[], DeviceState] | None = None

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def weights_sharding(self) -> NamedSharding | None:
        """How weights lie, along their first axis; None on a single device."""
        return None if self._mesh is None else NamedSharding(self._mesh, SHARDED)

    def new_state(self, shard: ModelConfig, config: EngineConfig) -> DeviceState:
        """Allocate an empty state; it compiles nothing from its second call on."""
        if self._mesh is None:
            return new_device_state(shard, config)
        if self._allocate is None:
            self._allocate = jax.jit(
                jax.shard_map(
                    partial(new_device_state, shard, config),
                    mesh=self._mesh,
                    in_specs=(),
                    out_specs=DeviceState._make((SHARDED, SAME)),
                )
            )
        return self._allocate()

    def describe_state(self, shard: ModelConfig, config: EngineConfig) -> DeviceState:
        """Return the shapes of `new_state`, of which nothing is allocated."""
        state: DeviceState = jax.eval_shape(partial(new_device_state, shard, config))
        if self._mesh is None:
            return state

        def join(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            shape = (self.num_devices * x.shape[0], *x.shape[1:])
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=self.weights_sharding)

        return DeviceState(jax.tree.map(join, state.kv_cache), self.describe(state.last_token))

    def replicate[T](self, arrays: T) -> T:
        """Return a tree of arrays that lie on the first device so that they lie on all."""
        if self._mesh is None:
            return arrays
        replicated: T = jax.device_put(arrays, NamedSharding(self._mesh, SAME))
        return replicated

    def describe[T](self, shapes: T) -> T:
        """Return a tree of shapes as those of arrays that are the same on all devices."""
        if self._mesh is None:
            return shapes
        sharding = NamedSharding(self._mesh, SAME)
        described: T = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
        )
        return described

    def spread_forward(self, forward: Forward) -> Forward:
        """Return the way through a shard's layers as one through those of all devices."""
        return self._spread(forward, (SHARDED, SHARDED, SAME, SAME), (SHARDED, SAME, SAME))

    def spread_choose(self, choose: Choose) -> Choose:
        """Return the choice of tokens on one device as one on all, which is the same."""
        return self._spread(choose, (SHARDED, SAME, SAME, SAME), (SAME, SAME, SAME))

    def _spread[F: Callable[..., Any]](
        self, function: F, inputs: tuple[PartitionSpec, ...], outputs: tuple[PartitionSpec, ...]
    ) -> F:
        if self._mesh is None:
            return function
        # What is the same on all devices is so by construction, which JAX cannot see.
        spread: F = jax.shard_map(
            function, mesh=self._mesh, in_specs=inputs, out_specs=outputs, check_vma=False
        )
        return spread


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
