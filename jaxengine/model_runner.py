"""The device side of a step: compiled programs, device state, and one transfer each way."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from jaxengine.batch import BatchBuilder, BatchLayout, pick_token_ids
from jaxengine.buckets import Bucket, buckets_for
from jaxengine.compile_guard import CompileGuard
from jaxengine.config import EngineConfig
from jaxengine.kv_cache import DeviceState, new_device_state
from jaxengine.models.config import ModelConfig
from jaxengine.models.decoder import Decoder
from jaxengine.sampling import sample
from jaxengine.scheduler_output import SchedulerOutput

__all__ = ["JaxModelRunner"]


class JaxModelRunner:
    """Runs steps of a decoder on JAX's default device; implements engine_core.ModelRunner.

    Owns: the device state and the compiled programs.
    Never: called by any but the engine thread after `warm_up`.
    """

    def __init__(self, decoder: Decoder, model: ModelConfig, config: EngineConfig) -> None:
        self._model = model
        self._config = config
        self._graph, weights = nnx.split(decoder)
        self._weights, self._weights_tree = jax.tree.flatten(weights)
        self._builder = BatchBuilder(
            buckets_for(config),
            block_size=config.block_size,
            max_blocks_per_seq=config.max_blocks_per_seq,
            spare_row=config.max_num_seqs,
            eos_token_ids=model.eos_token_ids,
        )
        self._programs: dict[Bucket, jax.stages.Compiled] = {}
        self._bucket_times_s: dict[Bucket, float] = {}
        self._guard = CompileGuard()
        self._state = new_device_state(model, config)

    @property
    def buckets(self) -> list[Bucket]:
        return [layout.bucket for layout in self._builder.layouts]

    @property
    def workspace_bytes(self) -> int:
        """Memory that the largest step takes besides weights and state, known after `warm_up`."""
        analyses = [program.memory_analysis() for program in self._programs.values()]
        return max((a.temp_size_in_bytes for a in analyses if a is not None), default=0)

    @property
    def bucket_times_s(self) -> dict[Bucket, float]:
        """How long a step without sequences takes in each bucket; measured by `warm_up`."""
        return self._bucket_times_s

    @property
    def compiles_after_ready(self) -> int:
        return self._guard.num_compiles

    def warm_up(self, *, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile every bucket and run each, so that nothing is left to be done later.

        Args:
            progress: called with (programs ready, programs in all).
        """
        layouts = self._builder.layouts
        # Tracing holds the interpreter lock, compiling does not.
        pool = ThreadPoolExecutor(max_workers=2)
        try:
            jobs = [(layout, pool.submit(self.lower(layout).compile)) for layout in layouts]
            for index, (layout, job) in enumerate(jobs):
                self._programs[layout.bucket] = job.result()
                if progress is not None:
                    progress(index + 1, len(layouts))
        finally:
            # Whoever interrupts us waits for the program at hand, not for all of them.
            pool.shutdown(cancel_futures=True)
        self._bucket_times_s = {layout.bucket: self._time(layout) for layout in layouts}
        self._guard.arm()

    def close(self) -> None:
        """Stop counting compilations."""
        self._guard.disarm()

    def lower(self, layout: BatchLayout) -> jax.stages.Lowered:
        """Trace one bucket's step and lower it to the compiler's input."""
        graph, tree = self._graph, self._weights_tree

        def step(
            weights: list[Array], state: DeviceState, packed: Int[Array, "_"]
        ) -> tuple[DeviceState, Int[Array, "S"]]:
            decoder = nnx.merge(graph, jax.tree.unflatten(tree, weights))
            batch = layout.unpack(packed)
            hidden_TD, kv_cache = decoder(
                pick_token_ids(batch.token_ids, state.last_token),
                batch.positions,
                state.kv_cache,
                batch.attention,
                decode_only=layout.bucket.decode_only,
            )
            logits_SV = decoder.logits(hidden_TD[batch.sample_indices])
            sampled_S = sample(logits_SV, batch.sampling)
            last_token = state.last_token.at[batch.rows].set(sampled_S)
            return DeviceState(kv_cache, last_token), sampled_S

        packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
        return jax.jit(step, donate_argnums=1).lower(self._weights, self._state, packed)

    def execute(self, output: SchedulerOutput) -> "_JaxStep":
        """Launch a step without waiting for it."""
        layout, packed, sequences = self._builder.build(output)
        sampled = self._launch(layout, packed)
        return _JaxStep(sampled, sequences, layout.bucket.num_tokens)

    def reset(self) -> None:
        """Start from an empty cache; the old one may be lost with the failed step."""
        self._state = new_device_state(self._model, self._config)

    def _time(self, layout: BatchLayout) -> float:
        """Run a step without sequences; return the seconds that it took."""
        times_s = []
        for _ in range(2):  # the first run of a program has things to set up
            packed = np.zeros(layout.size, np.int32)
            # Only the reserved block and the spare row are written.
            layout.views(packed)["rows"][:] = self._config.max_num_seqs
            start_s = time.perf_counter()
            np.asarray(self._launch(layout, packed))
            times_s.append(time.perf_counter() - start_s)
        return min(times_s)

    def _launch(self, layout: BatchLayout, packed: np.ndarray) -> Array:
        program = self._programs[layout.bucket]
        sampled: Array
        self._state, sampled = program(self._weights, self._state, packed)
        return sampled


class _JaxStep:
    """A launched step whose tokens are on their way to the host."""

    def __init__(self, sampled: Array, sequences: list[int], num_slots: int) -> None:
        self._sampled = sampled
        self._sequences = sequences
        self.num_slots = num_slots
        sampled.copy_to_host_async()

    def result(self) -> Sequence[int]:
        token_ids: list[int] = np.asarray(self._sampled).tolist()
        return [token_ids[seq] for seq in self._sequences]
