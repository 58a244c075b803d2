"""The device side of a step: compiled programs, device state, and one transfer each way."""

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Int
from numpy.typing import NDArray

from jaxengine.batch import BatchBuilder, BatchLayout, PackedStep, pick_token_ids
from jaxengine.buckets import Bucket, buckets_for
from jaxengine.compile_guard import CompileGuard
from jaxengine.config import EngineConfig
from jaxengine.kv_cache import DeviceState, new_device_state
from jaxengine.logprobs import NUM_FIELDS, prompt_logprobs, read_logprobs
from jaxengine.models.config import ModelConfig
from jaxengine.models.decoder import Decoder
from jaxengine.next_token import next_tokens
from jaxengine.outputs import ItemLogprobs
from jaxengine.program_store import ProgramStore
from jaxengine.rule_arrays import RuleArrays, RuleLayout
from jaxengine.scheduler_output import ScheduledRequest, SchedulerOutput

__all__ = ["JaxModelRunner", "StepResults", "make_step", "make_steps"]

# Times of an earlier start are taken if one of them is off by no more than this factor.
MOST_PACE_CHANGE = 1.5

# A compilation has threads of its own, but much of it is done by one.
COMPILERS = max(2, min(8, (os.cpu_count() or 1) // 2))


class StepResults(NamedTuple):
    """What a step computes for the host; the host fetches only what somebody wants.

    Attributes:
        sampled: a token for each sequence.
        logprobs: of these tokens, as in `jaxengine.logprobs`.
        prompt_logprobs: of the tokens after each packed token.
    """

    sampled: Int[Array, "S"]
    logprobs: Int[Array, "S F"]
    prompt_logprobs: Int[Array, "T F"]


def make_step(
    graph: nnx.GraphDef[Decoder], tree: jax.tree_util.PyTreeDef, layout: BatchLayout
) -> Callable[
    [list[Array], DeviceState, Int[Array, "_"], RuleArrays], tuple[DeviceState, StepResults]
]:
    """Return one bucket's step, to be compiled with its second argument donated.

    Args:
        graph: of the decoder.
        tree: of its weights, whose leaves are the step's first argument.
        layout: of the bucket.
    """

    def step(
        weights: list[Array], state: DeviceState, packed: Int[Array, "_"], rules: RuleArrays
    ) -> tuple[DeviceState, StepResults]:
        decoder = nnx.merge(graph, jax.tree.unflatten(tree, weights))
        batch = layout.unpack(packed)
        token_ids_T = pick_token_ids(batch.token_ids, state.last_token)
        hidden_TD, kv_cache = decoder(
            token_ids_T,
            batch.positions,
            state.kv_cache,
            batch.attention,
            decode_only=layout.bucket.decode_only,
        )
        ends_S = batch.sample_indices
        logits_SV = decoder.logits(hidden_TD[ends_S])
        pending_S = jnp.where(batch.token_ids[ends_S] < 0, token_ids_T[ends_S], -1)
        sampled_S, logprobs_SF = next_tokens(
            logits_SV,
            batch,
            rules,
            pending_S,
            compute_logits=lambda: decoder.logits(hidden_TD[ends_S]),
        )
        last_token = state.last_token.at[batch.rows].set(sampled_S)
        results = StepResults(
            sampled=sampled_S,
            logprobs=logprobs_SF,
            prompt_logprobs=lax.cond(
                batch.any_targets,
                lambda: prompt_logprobs(
                    hidden_TD, batch.targets, decoder.logits, chunk=layout.bucket.num_seqs
                ),
                lambda: jnp.zeros((*batch.targets.shape, NUM_FIELDS), jnp.int32),
            )
            if batch.targets.size
            else jnp.zeros((0, NUM_FIELDS), jnp.int32),
        )
        return DeviceState(kv_cache, last_token), results

    return step


def make_steps(
    graph: nnx.GraphDef[Decoder], tree: jax.tree_util.PyTreeDef, layout: BatchLayout
) -> Callable[
    [list[Array], DeviceState, Int[Array, "K _"], RuleArrays], tuple[DeviceState, StepResults]
]:
    """Return several of one bucket's steps after each other, to be compiled as a step is.

    Their results are stacked, without log-probabilities.
    """
    step = make_step(graph, tree, layout)

    def steps(
        weights: list[Array], state: DeviceState, packed: Int[Array, "K _"], rules: RuleArrays
    ) -> tuple[DeviceState, StepResults]:
        def one(state: DeviceState, packed: Int[Array, "_"]) -> tuple[DeviceState, StepResults]:
            state, (sampled, logprobs, prompt_logprobs) = step(weights, state, packed, rules)
            return state, StepResults(sampled, logprobs[:0], prompt_logprobs[:0])

        return lax.scan(one, state, packed)

    return steps


class JaxModelRunner:
    """Runs steps of a decoder on JAX's default device; implements engine_core.ModelRunner.

    Owns: the device state and the compiled programs.
    Never: called by any but the engine thread after `warm_up`.
    """

    def __init__(
        self,
        decoder: Decoder,
        model: ModelConfig,
        config: EngineConfig,
        *,
        programs_dir: Path | None = None,
    ) -> None:
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
            sliding_window=model.sliding_window,
        )
        self._programs: dict[Bucket, jax.stages.Compiled] = {}
        self._programs_ahead: dict[Bucket, jax.stages.Compiled] = {}  # of several steps
        self._bucket_times_s: dict[Bucket, float] = {}
        self._guard = CompileGuard()
        self._state = new_device_state(model, config)
        self._no_rules = {
            num_seqs: self._rule_layout(num_seqs).resident()
            for num_seqs in {bucket.num_seqs for bucket in self.buckets}
        }
        self._store = None
        if programs_dir is not None:
            shapes = jax.eval_shape(lambda x: x, (self._weights, self._state))
            facts = (repr(model), repr(jax.tree.structure(shapes)), repr(jax.tree.leaves(shapes)))
            self._store = ProgramStore(programs_dir, facts=facts)

    @property
    def buckets(self) -> list[Bucket]:
        return [layout.bucket for layout in self._builder.layouts]

    @property
    def workspace_bytes(self) -> int:
        """Memory that steps take besides weights and state, known after `warm_up`.

        That of the largest one, and the arrays that steps without rules about tokens share.
        """
        programs = (*self._programs.values(), *self._programs_ahead.values())
        analyses = [program.memory_analysis() for program in programs]
        largest: int = max((a.temp_size_in_bytes for a in analyses if a is not None), default=0)
        shared: int = sum(array.nbytes for array in jax.tree.leaves(self._no_rules))
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
        num_ahead = self._config.decode_steps
        wanted = [(self._programs, layout, 1) for layout in self._builder.layouts]
        if num_ahead > 1:
            wanted += [
                (self._programs_ahead, layout, num_ahead)
                for layout in self._builder.layouts
                if layout.bucket.num_tokens == layout.bucket.num_seqs
            ]
        # Tracing holds the interpreter lock; compiling and loading do not.
        pool = ThreadPoolExecutor(max_workers=COMPILERS)
        try:
            jobs = [
                (programs, layout, pool.submit(self._program, layout, num_steps))
                for programs, layout, num_steps in wanted
            ]
            for index, (programs, layout, job) in enumerate(jobs):
                programs[layout.bucket] = job.result()
                if progress is not None:
                    progress(index + 1, len(jobs))
        finally:
            # Whoever interrupts us waits for the program at hand, not for all of them.
            pool.shutdown(cancel_futures=True)
        self._bucket_times_s = dict(
            zip(self.buckets, self._recall_times() or self._measure_times(), strict=True)
        )
        for layout in [x for x in self._builder.layouts if x.bucket in self._programs_ahead]:
            idle = np.stack([self._idle_step(layout)] * num_ahead)
            np.asarray(self._launch(layout, idle, self._no_rules[layout.bucket.num_seqs]).sampled)
        self._guard.arm()

    def close(self) -> None:
        """Stop counting compilations."""
        self._guard.disarm()

    def _program(self, layout: BatchLayout, num_steps: int) -> jax.stages.Compiled:
        """Return a bucket's program, from the store if it is there."""
        rules = jax.eval_shape(lambda x: x, self._no_rules[layout.bucket.num_seqs])
        fact = repr((layout, rules, num_steps))
        kept = None if self._store is None else self._store.load(fact)
        program = kept or self.lower(layout, num_steps).compile()
        if self._store is not None and kept is None:
            self._store.save(fact, program)
        return program

    def lower(self, layout: BatchLayout, num_steps: int = 1) -> jax.stages.Lowered:
        """Trace one bucket's step, or several of them, and lower it to the compiler's input."""
        make = make_step if num_steps == 1 else make_steps
        shape = (layout.size,) if num_steps == 1 else (num_steps, layout.size)
        step = make(self._graph, self._weights_tree, layout)
        packed = jax.ShapeDtypeStruct(shape, jnp.int32)
        rules = self._no_rules[layout.bucket.num_seqs]
        return jax.jit(step, donate_argnums=1).lower(self._weights, self._state, packed, rules)

    def execute(self, outputs: Iterable[SchedulerOutput]) -> list["_JaxStep"]:
        """Launch steps without waiting for them; see engine_core.ModelRunner."""
        steps: list[tuple[PackedStep, RuleArrays, Sequence[ScheduledRequest]]] = []
        for output in outputs:
            # Who ends on the way leaves a hole in the bucket.
            layout = steps[0][0].layout if steps else None
            steps.append((*self._pack(output, layout), output.scheduled))
        first, rules, _ = steps[0]
        if len(steps) > 1 and len(steps) == self._config.decode_steps:
            packed = np.stack([step.packed for step, _, _ in steps])
            results = self._launch(first.layout, packed, rules)
            return [_JaxStep(results, step, items, i) for i, (step, _, items) in enumerate(steps)]
        return [
            _JaxStep(self._launch(step.layout, step.packed, rules), step, items)
            for step, rules, items in steps
        ]

    def seconds_on_device(self, output: SchedulerOutput, *, repeats: int) -> float:
        """Run a step over and over; return what it takes where no host is waited for.

        For measurements only: it leaves other tokens behind than one run would.
        """
        step, rules = self._pack(output)
        results = self._launch(step.layout, step.packed, rules)
        np.asarray(results.sampled)  # so that nothing is in flight
        start_s = time.perf_counter()
        for _ in range(repeats):
            results = self._launch(step.layout, step.packed, rules)
        np.asarray(results.sampled)
        return (time.perf_counter() - start_s) / repeats

    def _pack(
        self, output: SchedulerOutput, layout: BatchLayout | None = None
    ) -> tuple[PackedStep, RuleArrays]:
        step = self._builder.build(output, layout)
        rules = self._no_rules[step.layout.bucket.num_seqs]
        if step.rules:
            rules = self._rule_layout(step.layout.bucket.num_seqs).pack(step.rules, rules)
        return step, rules

    def reset(self) -> None:
        """Start from an empty cache; the old one may be lost with the failed step."""
        self._state = new_device_state(self._model, self._config)

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
        pace = self._time(self._builder.layouts[0]) / times_s[0]
        if not 1 / MOST_PACE_CHANGE <= pace <= MOST_PACE_CHANGE:
            return None
        return [time_s * pace for time_s in times_s]

    @property
    def _times_fact(self) -> str:
        return f"times of {self._builder.layouts!r}"

    def _time(self, layout: BatchLayout) -> float:
        """Run a step without sequences; return the seconds that it took."""
        times_s = []
        for _ in range(2):  # the first run of a program has things to set up
            packed = self._idle_step(layout)
            start_s = time.perf_counter()
            rules = self._no_rules[layout.bucket.num_seqs]
            np.asarray(self._launch(layout, packed, rules).sampled)
            times_s.append(time.perf_counter() - start_s)
        return min(times_s)

    def _idle_step(self, layout: BatchLayout) -> NDArray[np.int32]:
        """Return a step that writes only the reserved block and the spare row."""
        packed = np.zeros(layout.size, np.int32)
        layout.views(packed)["rows"][:] = self._config.max_num_seqs
        return packed

    def _launch(
        self, layout: BatchLayout, packed: NDArray[np.int32], rules: RuleArrays
    ) -> StepResults:
        """Start a step, or several that are stacked."""
        programs = self._programs if packed.ndim == 1 else self._programs_ahead
        program = programs[layout.bucket]
        results: StepResults
        self._state, results = program(self._weights, self._state, packed, rules)
        return results

    def _rule_layout(self, num_seqs: int) -> RuleLayout:
        return RuleLayout(num_seqs, self._model.vocab_size, self._config.max_model_len)


class _JaxStep:
    """A launched step whose tokens are on their way to the host.

    Args:
        index: which one it is, if the results are of several steps.
    """

    def __init__(
        self,
        results: StepResults,
        step: PackedStep,
        items: Sequence[ScheduledRequest],
        index: int | None = None,
    ) -> None:
        self._results = results
        self._index = index
        self._step = step
        self._items = items
        self.num_slots = step.layout.bucket.num_tokens
        results.sampled.copy_to_host_async()
        if step.logprobs:
            results.logprobs.copy_to_host_async()
        if step.prompt_logprobs:
            results.prompt_logprobs.copy_to_host_async()

    def is_done(self) -> bool:
        # Arrays have it, their type does not tell.
        return bool(self._results.sampled.is_ready())  # type: ignore[attr-defined]

    def result(self) -> Sequence[int]:
        sampled = np.asarray(self._results.sampled)
        token_ids: list[int] = (sampled if self._index is None else sampled[self._index]).tolist()
        return [token_ids[seq] for seq in self._step.sequences]

    def logprobs(self) -> Mapping[int, ItemLogprobs]:
        step, found = self._step, {}
        if step.logprobs:
            rows = np.asarray(self._results.logprobs)
            for index in step.logprobs:
                num_top = self._items[index].request.params.logprobs or 0
                sampled = read_logprobs(rows[step.sequences[index]], num_top)
                found[index] = ItemLogprobs(sampled, 0, ())
        if step.prompt_logprobs:
            rows = np.asarray(self._results.prompt_logprobs)
            for index, start, count in step.prompt_logprobs:
                item = self._items[index]
                num_top = item.request.params.prompt_logprobs or 0
                prompt = tuple(read_logprobs(row, num_top) for row in rows[start : start + count])
                sampled_too = found[index].sampled if index in found else None
                found[index] = ItemLogprobs(sampled_too, item.first_position + 1, prompt)
        return found
