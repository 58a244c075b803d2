"""The engine on a GPU, with random weights in the shapes of known models: nothing to download."""

import gc
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.async_engine import AsyncEngine
from jaxengine.config import BatchingMode, EngineConfig
from jaxengine.device_interface import StepHandle
from jaxengine.engine_core import EngineCore
from jaxengine.kv_cache import kv_block_bytes
from jaxengine.model_runner import JaxModelRunner
from jaxengine.models.config import ModelConfig
from jaxengine.models.decoder import Decoder
from jaxengine.outputs import ItemLogprobs
from jaxengine.request import Request
from jaxengine.sampling_params import SamplingParams
from jaxengine.scheduler_output import SchedulerOutput
from jaxengine.step_time import StepTimeModel
from jaxengine.token_engine import EngineLimits
from kernels_pallas.kernel_names import AttentionKernel

__all__ = ["MODELS", "EngineUnderTest", "RunFigures"]

BLOCK_SIZE = 16

# Launches of a step, one after the other.
PROBE_REPEATS = 20

MODELS: Mapping[str, ModelConfig] = {
    "qwen3-0.6b": ModelConfig(
        family="qwen3",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_embeddings=True,
        qk_norm=True,
    ),
    "qwen3-8b": ModelConfig(
        family="qwen3",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        qk_norm=True,
    ),
    "llama-3-8b": ModelConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
    ),
    # For the dry run.
    "tiny": ModelConfig(
        family="llama",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFigures:
    """What a set of requests took.

    Attributes:
        step_ms: median time from step to step.
        waited_ms: median time of it in which the host waited for the device.
        device_ms: what a step takes where no host is waited for; None unless all requests are
            alike. What a step takes more is a gap in the device's work.
    """

    seconds: float
    prompt_tokens: int
    output_tokens: int
    steps: int
    step_ms: float
    waited_ms: float
    device_ms: float | None = None

    def row(self) -> dict[str, Any]:
        row = {**asdict(self), "output_tokens_per_s": self.output_tokens / self.seconds}
        if self.device_ms is not None:
            row["gap_share"] = max(0.0, 1 - self.device_ms / self.step_ms)
        return row


class EngineUnderTest:
    """A warm model, stepped without threads."""

    def __init__(
        self,
        model: ModelConfig,
        *,
        kernel: AttentionKernel,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        decode_steps: int = 1,
    ) -> None:
        self.model = model
        self.config = EngineConfig(
            dtype="bfloat16",
            attention_kernel=kernel,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            token_buckets=(max_num_batched_tokens,),
            block_size=BLOCK_SIZE,
            num_blocks=max_num_seqs * -(-max_model_len // BLOCK_SIZE) + 1,
            enable_prefix_caching=False,
            decode_steps=decode_steps,
        )
        start_s = time.perf_counter()
        decoder = random_decoder(model)
        self.weight_bytes: int = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(decoder)))
        if not model.tie_embeddings:  # of which a step reads a few rows
            self.weight_bytes -= decoder.embedding[...].nbytes
        self._runner = JaxModelRunner(decoder, model, self.config)
        self._runner.warm_up()
        self.start_s = time.perf_counter() - start_s

    def close(self) -> None:
        """Give the memory of the device back."""
        self._runner.close()
        del self._runner
        gc.collect()

    @property
    def flop_per_token(self) -> float:
        """Operations of the products with weights for one token of a prompt."""
        embedding = 2 * self.model.vocab_size * self.model.hidden_size  # once a prompt
        return self.weight_bytes - embedding  # two bytes a weight, two operations

    def floor_bytes(self, num_seqs: int, context: int) -> int:
        """Return what a decode step must read: the weights, and K and V."""
        block_bytes = kv_block_bytes(
            self.model,
            block_size=BLOCK_SIZE,
            dtype="bfloat16",
            kernel=self.config.attention_kernel,
        )
        return self.weight_bytes + num_seqs * context * block_bytes // BLOCK_SIZE

    def serving(self) -> AsyncEngine:
        """Return an engine for a gateway, not started, on the same model and programs."""
        limits = EngineLimits(
            max_model_len=self.config.max_model_len,
            vocab_size=self.model.vocab_size,
            max_num_seqs=self.config.max_num_seqs,
            max_num_queued_requests=self.config.max_num_queued_requests,
            eos_token_ids=(),
        )
        runner = self._runner
        step_times = StepTimeModel(
            runner.buckets, runner.bucket_times_s, skips_padding=runner.skips_padding
        )
        core = EngineCore(self.config, runner, eos_token_ids=(), step_times=step_times)
        return AsyncEngine(core, limits)

    def run(
        self,
        lengths: Sequence[tuple[int, int]],
        *,
        batching: BatchingMode = "continuous",
        decode_steps: int = 1,
    ) -> RunFigures:
        """Answer requests of (prompt, output) tokens that are all there from the beginning.

        Args:
            lengths: of the requests.
            batching: as in EngineConfig.
            decode_steps: likewise; 1, or what there are programs for.
        """
        probe = _probe_of(lengths) if decode_steps == 1 else None
        runner = _WatchedRunner(self._runner, probe)
        config = replace(self.config, batching=batching, decode_steps=decode_steps)
        core = EngineCore(config, runner, eos_token_ids=())
        rng = np.random.default_rng(0)
        for index, (num_prompt, num_output) in enumerate(lengths):
            core.add(
                Request(
                    request_id=str(index),
                    prompt_token_ids=tuple(
                        rng.integers(0, self.model.vocab_size, num_prompt).tolist()
                    ),
                    params=SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True),
                    seed=index,
                    arrival_time_s=time.monotonic(),
                )
            )
        ends_s, waits_s, counts = [time.perf_counter()], [], []
        while core.has_work:
            runner.waited_s, runner.num_launched = 0.0, 0
            core.step()
            ends_s.append(time.perf_counter())
            waits_s.append(runner.waited_s)
            counts.append(runner.num_launched)
        shares = np.maximum(counts, 1)  # nothing is launched at the end
        return RunFigures(
            seconds=ends_s[-1] - ends_s[0] - runner.probed_s,
            prompt_tokens=sum(num for num, _ in lengths),
            output_tokens=sum(num for _, num in lengths),
            steps=sum(counts),
            # The prompts are done in the first half of the steps of every run here.
            step_ms=1e3 * median((np.diff(ends_s) / shares)[len(counts) // 2 :].tolist()),
            waited_ms=1e3 * median((np.array(waits_s) / shares)[len(counts) // 2 :].tolist()),
            device_ms=None if runner.device_s is None else 1e3 * runner.device_s,
        )


class _Probe(NamedTuple):
    """The step that is measured by itself: the first of only decodes from such a position on."""

    num_seqs: int
    position: int


def _probe_of(lengths: Sequence[tuple[int, int]]) -> _Probe | None:
    """Return the middle of the second half of the steps of requests that are all alike."""
    if len(set(lengths)) != 1:
        return None
    num_prompt, num_output = lengths[0]
    return _Probe(len(lengths), num_prompt + 3 * num_output // 4)


class _WatchedRunner:
    """Tells how long the host waits for the device, and what a step takes without waiting.

    Attributes:
        waited_s: for the device, until it is set to zero.
        num_launched: steps, likewise.
        device_s: of the step of the probe; None if there was none.
        probed_s: how long finding that out took.
    """

    def __init__(self, runner: JaxModelRunner, probe: _Probe | None) -> None:
        self._runner = runner
        self._probe = probe
        self.waited_s = 0.0
        self.num_launched = 0
        self.device_s: float | None = None
        self.probed_s = 0.0

    @property
    def compiles_after_ready(self) -> int:
        return self._runner.compiles_after_ready

    def execute(self, outputs: Iterable[SchedulerOutput]) -> Sequence[StepHandle]:
        steps = self._runner.execute(map(self._watch, outputs))
        return [_WatchedStep(self, step) for step in steps]

    @property
    def can_overtake(self) -> bool:
        return False

    def overtake(
        self, running: Sequence[StepHandle], output: SchedulerOutput
    ) -> tuple[StepHandle, Sequence[StepHandle]]:
        raise NotImplementedError

    def _watch(self, output: SchedulerOutput) -> SchedulerOutput:
        self.num_launched += 1
        if self._is_probe(output):
            start_s = time.perf_counter()
            self.device_s = self._runner.seconds_on_device(output, repeats=PROBE_REPEATS)
            self.probed_s = time.perf_counter() - start_s
        return output

    def reset(self) -> None:
        self._runner.reset()

    def _is_probe(self, output: SchedulerOutput) -> bool:
        probe = self._probe
        return (
            probe is not None
            and self.device_s is None
            and len(output.scheduled) == output.num_tokens == probe.num_seqs
            and output.scheduled[0].first_position >= probe.position
        )


class _WatchedStep:
    def __init__(self, runner: _WatchedRunner, step: StepHandle) -> None:
        self._runner, self._step = runner, step

    @property
    def num_slots(self) -> int:
        return self._step.num_slots

    def is_done(self) -> bool:
        return self._step.is_done()

    def result(self) -> Sequence[int]:
        start_s = time.perf_counter()
        tokens = self._step.result()
        self._runner.waited_s += time.perf_counter() - start_s
        return tokens

    def logprobs(self) -> Mapping[int, ItemLogprobs]:
        return self._step.logprobs()


def random_decoder(model: ModelConfig) -> Decoder:
    """Return a decoder with small random weights, made on the device."""
    decoder = nnx.eval_shape(lambda: Decoder(model, dtype=jnp.bfloat16))
    graph, state = nnx.split(decoder)
    leaves, tree = jax.tree.flatten(state)

    def fill(seed: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return 0.02 * jax.random.normal(jax.random.key(seed), leaf.shape, leaf.dtype)

    make = jax.jit(fill, static_argnums=1)
    filled = [make(index, _Shape(leaf.shape, leaf.dtype)) for index, leaf in enumerate(leaves)]
    result: Decoder = nnx.merge(graph, jax.tree.unflatten(tree, filled))
    return result


@dataclass(frozen=True)
class _Shape:
    """Shape and dtype that can be a static argument."""

    shape: tuple[int, ...]
    dtype: Any
