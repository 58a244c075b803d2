"""The device side of a step: compiled programs, device state, and one transfer each way."""

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int
from numpy.typing import NDArray

from jaxengine.batch import BatchBuilder
from jaxengine.batch_layout import BatchLayout
from jaxengine.buckets import Bucket, buckets_for
from jaxengine.compile_guard import CompileGuard
from jaxengine.config import EngineConfig
from jaxengine.device_mesh import DeviceMesh
from jaxengine.jax_steps import JaxStep, JaxStepOfMany, Launch, StepResults
from jaxengine.kv_cache import DeviceState
from jaxengine.models.config import ModelConfig
from jaxengine.models.decoder import Decoder
from jaxengine.processes import ProcessGroup, StepOrder
from jaxengine.program_store import ProgramStore
from jaxengine.rule_arrays import RuleArrays, RuleLayout
from jaxengine.scheduler_output import SchedulerOutput
from jaxengine.step_programs import (
    Begun,
    Choose,
    Forward,
    Forwarded,
    make_choose,
    make_forward,
    make_go_on,
    make_steps,
)
from kernels_pallas.native import NativeLibrary

__all__ = ["JaxModelRunner"]

# Times of an earlier start are taken, at today's pace, if that is off by no more than this factor.
MOST_PACE_CHANGE = 3.0

# A compilation has threads of its own, but much of it is done by one.
COMPILERS = max(2, min(8, (os.cpu_count() or 1) // 2))


class JaxModelRunner:
    """Runs steps of a decoder on a device, or several; implements device_interface.ModelRunner.

    Owns: the device state and the compiled programs.
    Never: called by any but the engine thread after `warm_up`.

    Args:
        decoder: with its weights; from models.shard_loader where several devices share them.
        model: what it looks like; a shard of the model, likewise.
        config: what to compile for.
        devices: None takes JAX's first.
        state: an empty one; None allocates it.
        group: the processes that run the same steps; None if this is the only one.
        programs_dir: where compiled programs are kept; None keeps none.
        library: if it serves. Without it no step can overtake another.

    Attributes:
        skips_padding: the device computes tokens, not buckets.
        can_overtake: whether there is `overtake`.
    """

    def __init__(
        self,
        decoder: Decoder,
        model: ModelConfig,
        config: EngineConfig,
        *,
        devices: DeviceMesh | None = None,
        state: DeviceState | None = None,
        group: ProcessGroup | None = None,
        programs_dir: Path | None = None,
        library: NativeLibrary | None = None,
    ) -> None:
        self._model = model
        self._config = config
        self._num_ahead = config.decode_steps
        self._devices = devices or DeviceMesh(jax.devices()[:1])
        self._group = group
        self.skips_padding = decoder.stack is not None
        self.can_overtake = (
            library is not None and group is None and config.decode_steps == 1 and decoder.can_pause
        )
        self._library = library
        self._graph, weights = nnx.split(decoder)
        self._weights, self._weights_tree = jax.tree.flatten(weights)
        self._builder = BatchBuilder(
            buckets_for(config, skips_padding=self.skips_padding),
            block_size=config.block_size,
            max_blocks_per_seq=config.max_blocks_per_seq,
            spare_row=config.max_num_seqs,
            eos_token_ids=model.eos_token_ids,
            sliding_window=model.sliding_window,
            skips_padding=self.skips_padding,
        )
        self._forward: dict[Bucket, jax.stages.Compiled] = {}
        self._choose: dict[int, jax.stages.Compiled] = {}
        self._ahead: dict[Bucket, jax.stages.Compiled] = {}  # several steps of decodes
        self._bucket_times_s: dict[Bucket, float] = {}
        self._guard = CompileGuard()
        self._state = self._devices.new_state(model, config) if state is None else state
        self._no_rules = {
            num_seqs: self._devices.replicate(self._rule_layout(num_seqs).resident())
            for num_seqs in {bucket.num_seqs for bucket in self.buckets}
        }
        self._nothing = jnp.zeros((0, 0), jnp.int32)
        self._booleans = (jnp.bool_(False), jnp.bool_(True))
        self._nothing_begun: dict[Bucket, Begun] = {}
        if self.can_overtake:
            self._nothing_begun = {
                layout.bucket: Begun.nothing(layout, model.hidden_size)
                for layout in self._builder.layouts
            }
        self._store = None
        if programs_dir is not None:
            shapes = jax.eval_shape(lambda x: x, (self._weights, self._state))
            facts = (repr(model), repr(jax.tree.structure(shapes)), repr(jax.tree.leaves(shapes)))
            self._store = ProgramStore(programs_dir, facts=facts, devices=self._devices.devices)

    @property
    def buckets(self) -> list[Bucket]:
        return [layout.bucket for layout in self._builder.layouts]

    @property
    def workspace_bytes(self) -> int:
        """Memory that steps take besides weights and state, known after `warm_up`.

        That of the largest one, and the arrays that steps share which have no rules about tokens,
        or have not begun.
        """
        programs = (*self._forward.values(), *self._choose.values(), *self._ahead.values())
        analyses = [program.memory_analysis() for program in programs]
        largest: int = max((a.temp_size_in_bytes for a in analyses if a is not None), default=0)
        arrays = jax.tree.leaves((self._no_rules, self._nothing_begun))
        shared: int = sum(array.nbytes for array in arrays)
        return largest + shared

    @property
    def bucket_times_s(self) -> dict[Bucket, float]:
        """How long a step without sequences takes in each bucket; known after `warm_up`."""
        return self._bucket_times_s

    @property
    def compiles_after_ready(self) -> int:
        return self._guard.num_compiles

    def warm_up(self, *, progress: Callable[[int, int], None] | None = None) -> None:
        """Have a program for every bucket, and know its time, so that nothing is left for later.

        Args:
            progress: called with (programs ready, programs in all).
        """
        layouts = self._builder.layouts
        choices = {layout.choice.num_seqs: layout for layout in layouts}
        # Tracing holds the interpreter lock; compiling and loading do not.
        pool = ThreadPoolExecutor(max_workers=COMPILERS)
        try:
            # Those that take longest first.
            choosing = {
                num_seqs: pool.submit(
                    self._program, self._choice_fact(layout), self.lower_choice, layout
                )
                for num_seqs, layout in choices.items()
            }
            forwarding = {
                layout.bucket: pool.submit(
                    self._program, self._forward_fact(layout), self.lower, layout
                )
                for layout in layouts
            }
            ahead = {
                layout.bucket: pool.submit(
                    self._program, repr((layout, self._num_ahead)), self.lower_ahead, layout
                )
                for layout in layouts
                # Those that steps of nothing but decodes take.
                if self._num_ahead > 1 and layout.bucket.num_tokens == layout.bucket.num_seqs
            }
            jobs = (*choosing.values(), *forwarding.values(), *ahead.values())
            for index, job in enumerate(jobs):
                job.result()
                if progress is not None:
                    progress(index + 1, len(jobs))
            self._choose = {num_seqs: job.result() for num_seqs, job in choosing.items()}
            self._forward = {bucket: job.result() for bucket, job in forwarding.items()}
            self._ahead = {bucket: job.result() for bucket, job in ahead.items()}
        finally:
            # Whoever interrupts us waits for the program at hand, not for all of them.
            pool.shutdown(cancel_futures=True)
        self._bucket_times_s = dict(
            zip(self.buckets, self._recall_times() or self._measure_times(), strict=True)
        )
        self._guard.arm()

    def follow(self) -> None:
        """Run the steps of the process that leads, in place of `execute`, until it ends."""
        assert self._group is not None
        for order in self._group.orders():
            if order.bucket is None:
                self._state = self._devices.new_state(self._model, self._config)
                continue
            layout = self._builder.layouts[order.bucket]
            if order.arrays["packed"].ndim > 1:
                self._run_ahead(layout, order.arrays["packed"])
                continue
            resident = self._no_rules[layout.bucket.num_seqs]
            rules = (order.arrays.get(name, getattr(resident, name)) for name in resident._fields)
            self._run(layout, order.arrays["packed"], RuleArrays(*rules))

    def close(self) -> None:
        """Let the processes that follow end, and stop counting compilations."""
        if self._group is not None and self._group.leads:
            self._group.dismiss()
        self._guard.disarm()

    def _program(
        self, fact: str, lower: Callable[[BatchLayout], jax.stages.Lowered], layout: BatchLayout
    ) -> jax.stages.Compiled:
        """Return a program, from the store if it is there."""
        kept = None if self._store is None else self._store.load(fact)
        program = kept or lower(layout).compile()
        if self._store is not None and kept is None:
            self._store.save(fact, program)
        return program

    def lower(self, layout: BatchLayout) -> jax.stages.Lowered:
        """Trace one bucket's way through the layers, and lower it to the compiler's input."""
        packed = self._devices.describe(jax.ShapeDtypeStruct((layout.size,), jnp.int32))
        state = self._state
        operands: tuple[Any, ...] = (self._weights, state.kv_cache, state.last_token, packed)
        program: Callable[..., Any] = self._forward_of(layout)
        if self.can_overtake:
            program = make_go_on(self._graph, self._weights_tree, layout)
            operands += (self._nothing_begun[layout.bucket],)
        return jax.jit(program, donate_argnums=1).lower(*operands)

    def lower_choice(self, layout: BatchLayout) -> jax.stages.Lowered:
        """Trace how tokens are chosen in one bucket, and lower that."""
        num_seqs = layout.bucket.num_seqs
        forwarded = jax.eval_shape(
            lambda: Forwarded(
                hidden=jnp.zeros((num_seqs, self._model.hidden_size), jnp.float32),
                pending=jnp.zeros(num_seqs, jnp.int32),
                packed=jnp.zeros(layout.choice.size, jnp.int32),
            )
        )
        return jax.jit(self._choose_of(layout)).lower(
            self._weights,
            self._state.last_token,
            self._devices.describe(forwarded),
            self._no_rules[num_seqs],
        )

    def lower_ahead(self, layout: BatchLayout) -> jax.stages.Lowered:
        """Trace `decode_steps` steps of one bucket, and lower them."""
        steps = make_steps(self._forward_of(layout), self._choose_of(layout))
        shape = jax.ShapeDtypeStruct((self._num_ahead, layout.size), jnp.int32)
        packed = self._devices.describe(shape)
        state, rules = self._state, self._no_rules[layout.bucket.num_seqs]
        return jax.jit(steps, donate_argnums=1).lower(
            self._weights, state.kv_cache, state.last_token, packed, rules
        )

    def _forward_of(self, layout: BatchLayout) -> Forward:
        return self._devices.spread_forward(make_forward(self._graph, self._weights_tree, layout))

    def _choose_of(self, layout: BatchLayout) -> Choose:
        native = self._config.attention_kernel == "native"
        choose = make_choose(self._graph, self._weights_tree, layout.choice, native=native)
        return self._devices.spread_choose(choose)

    def execute(self, outputs: Iterable[SchedulerOutput]) -> Sequence[JaxStep | JaxStepOfMany]:
        """Launch steps without waiting for them; see device_interface.ModelRunner."""
        launches: list[Launch] = []
        for output in outputs:
            # Who ends on the way leaves a hole in the bucket.
            launches.append(self._pack(output, launches[0].step.layout if launches else None))
        if len(launches) > 1 and len(launches) == self._num_ahead:
            packed = np.stack([launch.step.packed for launch in launches])
            sampled = self._launch_ahead(launches[0].step.layout, packed)
            return [JaxStepOfMany(sampled, i, launch.step) for i, launch in enumerate(launches)]
        return [self._launch(launch) for launch in launches]

    def overtake(
        self, running: Sequence[object], output: SchedulerOutput
    ) -> tuple[JaxStep, list[JaxStep]]:
        """Launch a step to be run before the rest of others; see device_interface.ModelRunner."""
        assert self._library is not None
        steps = [step for step in running if isinstance(step, JaxStep)]
        first = self._launch(self._pack(output))
        serials = [step.launch.step.serial for step in steps]
        self._library.pause(serials[0], serials[-1])
        # What the second begins with, the first may have to choose first.
        return first, [
            self._launch_rest(step, knows_tokens=index == 0) for index, step in enumerate(steps)
        ]

    def _launch_rest(self, running: JaxStep, *, knows_tokens: bool) -> JaxStep:
        assert running.begun is not None
        # What was sent once need not be sent again.
        sent = jax.device_put(running.launch.sent)
        step = running.launch.step._replace(serial=self._next_serial())
        begun = running.begun._replace(
            knows_tokens=self._booleans[knows_tokens], serial=np.int32(step.serial)
        )
        return self._launch(running.launch._replace(step=step, sent=sent), begun)

    def seconds_on_device(self, output: SchedulerOutput, *, repeats: int) -> float:
        """Run a step over and over; return what it takes where no host is waited for.

        For measurements only: it leaves other tokens behind than one run would.
        """
        launch = self._pack(output)
        self._launch(launch).result()  # nothing is in flight
        start_s = time.perf_counter()
        *_, last = (self._launch(launch) for _ in range(repeats))
        last.result()
        return (time.perf_counter() - start_s) / repeats

    def _pack(self, output: SchedulerOutput, layout: BatchLayout | None = None) -> Launch:
        step = self._builder.build(output, layout, serial=self._next_serial())
        rules = self._no_rules[step.layout.bucket.num_seqs]
        if step.rules:
            rules = self._rule_layout(step.layout.bucket.num_seqs).pack(step.rules, rules)
        return Launch(step, step.packed, rules, output.scheduled)

    def _next_serial(self) -> int:
        """Return a number for a step that can be paused, 0 if none can."""
        return next(self._library.serials) if self._library is not None else 0

    def reset(self) -> None:
        """Start from an empty cache; the old one may be lost with the failed step."""
        if self._group is not None:
            self._group.tell(StepOrder(None, {}))
        self._state = self._devices.new_state(self._model, self._config)

    def _measure_times(self) -> list[float]:
        """Return how long every bucket takes, and keep that for the next start."""
        times_s = [self._time(layout) for layout in self._builder.layouts]
        if self._store is not None:
            self._store.save_bytes(self._times_fact, json.dumps(times_s).encode())
        return times_s

    def _recall_times(self) -> list[float] | None:
        """Return the times of an earlier start at today's pace; None if there are none that fit."""
        kept = None if self._store is None else self._store.load_bytes(self._times_fact)
        if kept is None:
            return None
        times_s: list[float] = json.loads(kept)
        pace = self._time(self._builder.layouts[0], repeats=5) / times_s[0]
        if not 1 / MOST_PACE_CHANGE <= pace <= MOST_PACE_CHANGE:
            return None
        return [time_s * pace for time_s in times_s]

    def _forward_fact(self, layout: BatchLayout) -> str:
        return f"{layout!r} {'to go on' if self.can_overtake else ''}"

    def _choice_fact(self, layout: BatchLayout) -> str:
        rules = jax.eval_shape(lambda x: x, self._no_rules[layout.bucket.num_seqs])
        return repr((layout.choice, rules))

    @property
    def _times_fact(self) -> str:
        return f"times of {self._builder.layouts!r}"

    def _time(self, layout: BatchLayout, *, repeats: int = 2) -> float:
        """Run a step without sequences; return the seconds that it took."""
        bucket, packed = layout.bucket, np.zeros(layout.size, np.int32)
        views = layout.views(packed)
        # Only the reserved block is written, and rows that are set again before they are read.
        views["rows"][:] = np.arange(bucket.num_seqs).clip(max=self._config.max_num_seqs)
        views["num_slots"][...] = bucket.num_tokens
        rules = self._no_rules[layout.bucket.num_seqs]
        times_s = []
        for _ in range(repeats):  # the first run of a program has things to set up
            start_s = time.perf_counter()
            np.asarray(self._run(layout, packed, rules)[0].sampled)
            times_s.append(time.perf_counter() - start_s)
        return min(times_s)

    def _launch(self, launch: Launch, begun: Begun | None = None) -> JaxStep:
        """Start a step, or what is left of one that has begun."""
        layout, packed, rules = launch.step.layout, launch.sent, launch.rules
        samples = self._group is not None or any(item.samples for item in launch.items)
        if self._group is not None:
            sent = {name: a for name, a in rules._asdict().items() if isinstance(a, np.ndarray)}
            order = StepOrder(
                self._builder.layouts.index(layout), {"packed": np.asarray(packed), **sent}
            )
            self._group.tell(order)
        results, reached = self._run(layout, packed, rules, begun, samples=samples)
        return JaxStep(results, launch, reached)

    def _run(
        self,
        layout: BatchLayout,
        packed: NDArray[np.int32] | Array,
        rules: RuleArrays,
        begun: Begun | None = None,
        *,
        samples: bool = True,
    ) -> tuple[StepResults, Begun | None]:
        last_token = self._state.last_token
        operands = [self._weights, self._state.kv_cache, last_token, packed]
        if self.can_overtake:
            operands.append(begun or self._nothing_begun[layout.bucket])
        kv_cache, forwarded, prompt_rows, *reached = self._forward[layout.bucket](*operands)
        begun = reached[0] if reached else None
        if not samples:
            # Nobody reads the tokens, but one can wait for them.
            self._state = DeviceState(kv_cache, last_token)
            return StepResults(forwarded.pending, self._nothing, prompt_rows), begun
        last_token, sampled, rows = self._choose[layout.bucket.num_seqs](
            self._weights, last_token, forwarded, rules
        )
        self._state = DeviceState(kv_cache, last_token)
        return StepResults(sampled, rows, prompt_rows), begun

    def _launch_ahead(self, layout: BatchLayout, packed: NDArray[np.int32]) -> Int[Array, "K S"]:
        """Start several steps, none of which has rules; return their tokens."""
        if self._group is not None:
            order = StepOrder(self._builder.layouts.index(layout), {"packed": packed})
            self._group.tell(order)
        sampled = self._run_ahead(layout, packed)
        sampled.copy_to_host_async()
        return sampled

    def _run_ahead(self, layout: BatchLayout, packed: NDArray[np.int32]) -> Int[Array, "K S"]:
        state, rules = self._state, self._no_rules[layout.bucket.num_seqs]
        sampled: Int[Array, "K S"]
        kv_cache, last_token, sampled = self._ahead[layout.bucket](
            self._weights, state.kv_cache, state.last_token, packed, rules
        )
        self._state = DeviceState(kv_cache, last_token)
        return sampled

    def _rule_layout(self, num_seqs: int) -> RuleLayout:
        return RuleLayout(num_seqs, self._model.vocab_size, self._config.max_model_len)
