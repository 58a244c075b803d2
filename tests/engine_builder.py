"""Small warm engines for tests. What they cost is compiling, so they are shared and cached."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from attention_kernels import can_project, ready_kernel, ready_library
from compile_cache import use_compile_cache
from golden_model import default_model_files, tiny_model_files
from jaxengine.config import EngineConfig, Quantization
from jaxengine.engine_core import EngineCore
from jaxengine.model_runner import JaxModelRunner
from jaxengine.models.config import ModelConfig
from jaxengine.models.decoder import Decoder
from jaxengine.models.loader import load_decoder
from jaxengine.outputs import RequestOutput
from jaxengine.request import Request
from jaxengine.sampling_params import SamplingParams
from jaxengine.stats import EngineStats
from jaxengine.weights.checkpoint import Checkpoint, open_checkpoint
from kernels_pallas.group_codes import GROUP, CodeBits, GroupCodes
from kernels_pallas.kernel_names import WantedKernel
from kernels_pallas.kv_cache import KVCache
from kernels_pallas.ragged_paged_attention import new_kv_cache
from kernels_pallas.work_plan import (
    AttentionBatch,
    max_decode_splits,
    max_prefill_tiles,
    plan_decode_splits,
    plan_prefill_tiles,
)

HF_CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 299,
}

BLOCK_SIZE = 16

# Two sizes of decode steps and two of mixed ones, so that the same request meets many buckets.
ENGINE_CONFIG = EngineConfig(
    dtype="float32",
    max_model_len=256,
    max_num_batched_tokens=256,
    token_buckets=(64, 256),
    max_num_seqs=16,
    block_size=BLOCK_SIZE,
    num_blocks=200,
)


class RandomCheckpoint:
    """Tensors of any decoder, drawn when asked for; the same ones for the same name."""

    def __init__(self, **changes: object) -> None:
        self.hf_config: Mapping[str, object] = {**HF_CONFIG, **changes}
        self.shapes = tensor_shapes(ModelConfig.from_hf(self.hf_config))

    def names(self) -> frozenset[str]:
        return frozenset(self.shapes)

    def get(self, name: str) -> np.ndarray:
        rng = np.random.default_rng(list(name.encode()))
        noise = rng.standard_normal(self.shapes[name], np.float32)
        return 1 + noise * 0.1 if name.endswith("norm.weight") else noise * 0.2

    def code_bits(self, name: str) -> CodeBits | None:
        return None

    def get_codes(self, name: str) -> GroupCodes:
        raise AssertionError(f"{name} is not stored in codes")


class CodedCheckpoint(RandomCheckpoint):
    """The same with all matrices in codes, and their numbers made of these.

    Args:
        layers: bits of the codes in layers.
        head: bits of the codes of the embedding, and of a head of its own.
        changes: as of RandomCheckpoint.
    """

    def __init__(self, layers: CodeBits = 4, head: CodeBits = 8, **changes: object) -> None:
        super().__init__(**changes)
        self._bits = {"_proj.weight": layers, "tokens.weight": head, "lm_head.weight": head}

    def code_bits(self, name: str) -> CodeBits | None:
        return next((bits for end, bits in self._bits.items() if name.endswith(end)), None)

    def get(self, name: str) -> np.ndarray:
        if self.code_bits(name) is None:
            return super().get(name)
        return self.get_codes(name).numbers()

    def get_codes(self, name: str) -> GroupCodes:
        return random_codes(name, *self.shapes[name], bits=self.code_bits(name))


def random_codes(seed: str, num_outputs: int, num_inputs: int, *, bits: CodeBits) -> GroupCodes:
    """Codes of numbers around zero, most of them below 0.5."""
    rng = np.random.default_rng(list(seed.encode()))
    least, dtype = (0, np.uint8) if bits == 4 else (-128, np.int8)
    codes = rng.integers(least, least + 2**bits, (num_outputs, num_inputs)).astype(dtype)
    scales = rng.uniform(0.3, 0.9, (num_outputs, num_inputs // GROUP)) / 2**bits
    minima = scales * rng.uniform(-9, -6, scales.shape) if bits == 4 else 0 * scales
    return GroupCodes(codes, scales.astype(np.float16), minima.astype(np.float16))


def tensor_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes as in transformers' modeling code, by Hugging Face name."""
    D, F, V, H = model.hidden_size, model.intermediate_size, model.vocab_size, model.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
    shapes["model.norm.weight"] = (D,)
    if not model.tie_embeddings:
        shapes["lm_head.weight"] = (V, D)
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (D,)
        shapes[prefix + "post_attention_layernorm.weight"] = (D,)
        if model.is_gemma2:
            shapes[prefix + "pre_feedforward_layernorm.weight"] = (D,)
            shapes[prefix + "post_feedforward_layernorm.weight"] = (D,)
        if model.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (H,)
            shapes[prefix + "self_attn.k_norm.weight"] = (H,)
        for part, heads in zip(
            "qkv", (model.num_heads, model.num_kv_heads, model.num_kv_heads), strict=True
        ):
            shapes[f"{prefix}self_attn.{part}_proj.weight"] = (heads * H, D)
            if model.qkv_bias:
                shapes[f"{prefix}self_attn.{part}_proj.bias"] = (heads * H,)
        shapes[prefix + "self_attn.o_proj.weight"] = (D, model.num_heads * H)
        shapes[prefix + "mlp.gate_proj.weight"] = (F, D)
        shapes[prefix + "mlp.up_proj.weight"] = (F, D)
        shapes[prefix + "mlp.down_proj.weight"] = (D, F)
    return shapes


@dataclass(frozen=True, eq=False)
class WarmRunner:
    """A model on the device with all its programs compiled."""

    runner: JaxModelRunner
    model: ModelConfig
    config: EngineConfig

    def session(self, **changes: object) -> "Session":
        """Start an engine on it; fields of EngineConfig that compile nothing may change.

        A smaller `num_blocks` leaves part of the device's cache unused.
        """
        return Session(self, replace(self.config, **changes))


class Session:
    """An engine with its own scheduler and prefix cache, on a shared runner."""

    def __init__(self, warm: WarmRunner, config: EngineConfig) -> None:
        self._core = EngineCore(config, warm.runner, eos_token_ids=warm.model.eos_token_ids)
        self._num_requests = 0

    def run(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[tuple[int, ...]]:
        """Run requests together to their ends; return their tokens."""
        return [output.new_token_ids for output in self.run_outputs(prompts, params)]

    def run_outputs(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """Run requests together to their ends; return all outputs of each merged into one."""
        answers: dict[str, RequestOutput | None] = {}
        for prompt, param in zip(prompts, params, strict=True):
            request_id = f"request-{self._num_requests}"
            self._num_requests += 1
            answers[request_id] = None
            seed = 0 if param.seed is None else param.seed % 2**64
            self._core.add(Request(request_id, tuple(prompt), param, seed=seed, arrival_time_s=0.0))
        while self._core.has_work:
            for output in self._core.step():
                assert output.error is None
                before = answers[output.request_id]
                answers[output.request_id] = output if before is None else before.merged(output)
            self._core.check_integrity()
        return [output for output in answers.values() if output is not None]

    @property
    def stats(self) -> EngineStats:
        return self._core.stats()


@functools.cache
def tiny_decoder(family: str, dtype: str = "float32") -> tuple[Decoder, ModelConfig]:
    """A golden checkpoint's decoder."""
    return decoder_of(open_checkpoint(tiny_model_files(family)), dtype)


@functools.cache
def random_decoder(
    dtype: str,
    *,
    packed: bool = False,
    quantization: Quantization | None = None,
    **changes: int | bool | str,
) -> tuple[Decoder, ModelConfig]:
    """A decoder with random weights; `changes` are keys of config.json."""
    checkpoint = RandomCheckpoint(**changes)
    return decoder_of(checkpoint, dtype, packed=packed, quantization=quantization)


@functools.cache
def packed_decoder(
    quantization: Quantization | None = None, *, model_type: str = "qwen2"
) -> tuple[Decoder, ModelConfig]:
    """Random weights in bfloat16 or quantized, packed; a qwen2 has biases.

    The former only where `can_project` says yes, the latter where the native kernel is ready.
    """
    checkpoint = RandomCheckpoint(
        model_type=model_type,
        vocab_size=320,
        intermediate_size=128,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        num_hidden_layers=3,
    )
    return decoder_of(checkpoint, "bfloat16", packed=True, quantization=quantization)


@functools.cache
def default_decoder(
    dtype: str, *, packed: bool = False, quantization: Quantization | None = None
) -> tuple[Decoder, ModelConfig]:
    """The default model's decoder; only for tests marked `model`."""
    checkpoint = open_checkpoint(default_model_files())
    return decoder_of(checkpoint, dtype, packed=packed, quantization=quantization)


def decoder_of(
    checkpoint: Checkpoint,
    dtype: str,
    *,
    packed: bool = False,
    quantization: Quantization | None = None,
    keep_codes: bool = False,
) -> tuple[Decoder, ModelConfig]:
    use_compile_cache()
    model = ModelConfig.from_hf(checkpoint.hf_config)
    decoder = load_decoder(
        model,
        checkpoint,
        dtype=dtype,
        packed=packed,
        quantization=quantization,
        codes=checkpoint if keep_codes else None,
    )
    return decoder, model


class Computed:
    """What a decoder makes of tokens, step by step, outside of any engine.

    Attributes:
        kv_cache: as made by the kernel; the sequence uses the blocks from 1 on.
    """

    def __init__(
        self, decoder: Decoder, model: ModelConfig, kv_cache_dtype: str, *, max_len: int
    ) -> None:
        use_compile_cache()
        self._decoder = decoder
        self._sliding_window = model.sliding_window
        self._num_blocks = -(-max_len // BLOCK_SIZE) + 1
        self.kv_cache = new_kv_cache(
            num_layers=model.num_layers,
            num_blocks=self._num_blocks,
            block_size=BLOCK_SIZE,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=kv_cache_dtype,
        )

    def step(
        self, token_ids: Sequence[int], first_position: int, *, num_tokens: int, num_seqs: int
    ) -> NDArray[np.float32]:
        """Compute some more tokens in a bucket of the given size; return their logits."""
        count = len(token_ids)
        positions = np.zeros(num_tokens, np.int32)
        positions[:count] = np.arange(first_position, first_position + count)
        slots = np.where(np.arange(num_tokens) < count, positions + BLOCK_SIZE, 0)
        starts = np.full(num_seqs + 1, count, np.int32)
        starts[0] = 0
        seq_lens = np.zeros(num_seqs, np.int32)
        seq_lens[0] = first_position + count
        tables = np.zeros((num_seqs, self._num_blocks - 1), np.int32)
        tables[0] = np.arange(1, self._num_blocks)
        tiles = np.zeros((max_prefill_tiles(num_tokens, num_seqs), 4), np.int32)
        num_decodes = int(count == 1)
        num_tiles = plan_prefill_tiles(starts[:2], seq_lens[:1], num_decodes, tiles)
        splits = np.zeros((max_decode_splits(num_seqs), 3), np.int32)
        split_starts = np.zeros(num_seqs + 1, np.int32)
        plan_decode_splits(seq_lens, num_decodes, splits, split_starts)
        windows: dict[str, NDArray[np.int32]] = {}
        if (window := self._sliding_window) is not None:
            most = max_decode_splits(num_seqs, sliding_window=window)
            windows["window_splits"] = np.zeros((most, 3), np.int32)
            windows["window_split_starts"] = np.zeros(num_seqs + 1, np.int32)
            plan_decode_splits(seq_lens, num_decodes, *windows.values(), sliding_window=window)
        batch = AttentionBatch(
            slot_mapping=slots.astype(np.int32),
            query_start_loc=starts,
            seq_lens=seq_lens,
            block_tables=tables,
            num_decodes=np.int32(num_decodes),
            prefill_tiles=tiles,
            num_prefill_tiles=np.int32(num_tiles),
            decode_splits=splits,
            split_starts=split_starts,
            **windows,
        )
        ids = np.zeros(num_tokens, np.int32)
        ids[:count] = token_ids
        graph, weights = nnx.split(self._decoder)
        logits, self.kv_cache = _run_decoder(
            graph, weights, ids, positions, self.kv_cache, batch, decode_only=num_tokens == num_seqs
        )
        return np.asarray(logits)[:count]


@partial(jax.jit, static_argnames=("graph", "decode_only"), donate_argnames="kv_cache")
def _run_decoder(
    graph: nnx.GraphDef[Decoder],
    weights: nnx.State,
    token_ids: jax.Array,
    positions: jax.Array,
    kv_cache: KVCache,
    batch: AttentionBatch,
    *,
    decode_only: bool,
) -> tuple[jax.Array, KVCache]:
    decoder = nnx.merge(graph, weights)
    hidden, kv_cache = decoder(token_ids, positions, kv_cache, batch, decode_only=decode_only)
    return decoder.logits(hidden), kv_cache


def warm_runner(
    decoder: Decoder,
    model: ModelConfig,
    config: EngineConfig,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> WarmRunner:
    """Compile every bucket."""
    use_compile_cache()
    library = ready_library(config.attention_kernel)
    runner = JaxModelRunner(decoder, model, config, library=library)
    runner.warm_up(progress=progress)
    return WarmRunner(runner, model, config)


@functools.cache
def warm_tiny_runner(
    family: str, dtype: str = "float32", *, kernel: WantedKernel = "auto", decode_steps: int = 1
) -> WarmRunner:
    """A golden checkpoint in the buckets of ENGINE_CONFIG, shared by all tests."""
    config = replace(
        ENGINE_CONFIG,
        dtype=dtype,
        attention_kernel=ready_kernel(kernel),
        decode_steps=decode_steps,
    )
    return warm_runner(*tiny_decoder(family, dtype), config)


@functools.cache
def warm_random_runner(
    dtype: str = "float32",
    kv_cache_dtype: str = "auto",
    *,
    kernel: WantedKernel = "auto",
    quantization: Quantization | None = None,
    **changes: int | bool | str,
) -> WarmRunner:
    """Random weights in the buckets of ENGINE_CONFIG, shared by all tests.

    Quantized ones are packed where that kernel has products for them.
    """
    config = replace(
        ENGINE_CONFIG,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        attention_kernel=ready_kernel(kernel),
    )
    packed = quantization is not None and config.attention_kernel == "native"
    decoder = random_decoder(dtype, packed=packed, quantization=quantization, **changes)
    return warm_runner(*decoder, config)


@functools.cache
def warm_default_runner(dtype: str, quantization: Quantization | None = None) -> WarmRunner:
    """The default model, packed as a server here would; only for tests marked `model`.

    Thirty layers that are not packed take long to compile: there is one size of mixed steps.
    """
    config = replace(
        ENGINE_CONFIG,
        dtype=dtype,
        quantization=quantization,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        token_buckets=(64,),
        attention_kernel=ready_kernel(),
    )
    native = config.attention_kernel == "native"
    packed = native and (quantization is not None or (dtype == "bfloat16" and can_project()))
    return warm_runner(*default_decoder(dtype, packed=packed, quantization=quantization), config)
