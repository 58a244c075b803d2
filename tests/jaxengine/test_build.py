import math
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from attention_kernels import can_project, ready_kernel
from compile_cache import use_compile_cache
from engine_builder import HF_CONFIG, CodedCheckpoint, RandomCheckpoint
from jaxengine import build
from jaxengine.build import build_engine, plan_engine
from jaxengine.config import EngineConfig
from jaxengine.engine_options import EngineOptions
from jaxengine.errors import ModelError
from jaxengine.kv_cache import kv_block_bytes
from jaxengine.models.config import ModelConfig
from jaxengine.models.loader import load_decoder
from jaxengine.sampling_params import SamplingParams
from jaxengine.token_engine import TokenRequest
from kernels_pallas.choice import KernelChoice, KernelUnavailable
from kernels_pallas.native import NativeLibrary

MIB = 1 << 20
# A block of 16 tokens: K and V, 2 layers, 2 heads padded to 64 elements, bf16.
BLOCK_BYTES = 2 * 2 * 2 * 16 * 64 * 2
MODEL = ModelConfig.from_hf(HF_CONFIG)  # context 512


def plan(memory_bytes=1 << 40, model=MODEL, **options):
    return plan_engine(
        EngineOptions(**{"block_size": 16} | options), model, memory_bytes=memory_bytes
    )


@pytest.mark.parametrize(("platform", "block_size"), [("cpu", 32), ("gpu", 16)])
def test_blocks_are_as_large_as_the_kernels_of_the_device_like_them(
    monkeypatch, platform, block_size
):
    monkeypatch.setattr(build.jax, "default_backend", lambda: platform)
    config, _ = plan(block_size=None, kv_cache_memory_bytes=64 * BLOCK_BYTES)
    assert (config.block_size, config.num_blocks) == (block_size, 64 * 16 // block_size)


def test_wishes_become_the_configuration_word_by_word():
    config, clamped_from = plan(
        dtype="float32",
        quantization="int8",
        kv_cache_dtype="bfloat16",
        max_model_len=300,
        max_num_batched_tokens=256,
        max_num_scheduled_tokens=64,
        max_num_seqs=5,
        long_prefill_token_threshold=40,
        target_itl_s=0.02,
        batching="dynamic",
        batch_window_s=0.5,
        scheduling_policy="priority",
        priority_aging_s=3.0,
        tenant_weights={"alice": 2.0},
        max_num_queued_requests=6,
        max_num_queued_tokens=7000,
        queue_timeout_s=30.0,
        block_size=32,
        num_kv_blocks=50,
        watermark=0.2,
        enable_prefix_caching=False,
        overlap=False,
        decode_steps=3,
        num_step_records=77,
        step_timeout_s=9.0,
    )
    assert clamped_from is None
    assert (config.dtype, config.max_model_len) == ("float32", 300)
    assert config.quantization == "int8"
    assert (config.max_num_batched_tokens, config.max_num_scheduled_tokens) == (256, 64)
    assert (config.max_num_seqs, config.max_num_queued_requests) == (5, 6)
    assert (config.block_size, config.num_blocks) == (32, 51)  # and the reserved one
    assert (config.watermark, config.enable_prefix_caching, config.overlap) == (0.2, False, False)
    assert (config.kv_cache_dtype, config.batching) == ("bfloat16", "dynamic")
    assert (config.long_prefill_token_threshold, config.target_itl_s) == (40, 0.02)
    assert (config.batch_window_s, config.scheduling_policy) == (0.5, "priority")
    assert (config.priority_aging_s, config.tenant_weights) == (3.0, {"alice": 2.0})
    assert (config.max_num_queued_tokens, config.queue_timeout_s) == (7000, 30.0)
    assert (config.decode_steps, config.num_step_records) == (3, 77)
    assert config.step_timeout_s == 9.0


def test_who_wishes_nothing_gets_the_defaults_of_the_configuration():
    config, _ = plan()
    decided = {"max_model_len": config.max_model_len, "num_blocks": config.num_blocks}
    # A server bounds its queue by itself: a million tokens, five minutes; and so its steps.
    queue = {"max_num_queued_tokens": 2**20, "queue_timeout_s": 300.0}
    bounds = {**queue, "step_timeout_s": 300.0}
    assert config == EngineConfig(**decided, **bounds)


@pytest.mark.parametrize(
    ("options", "memory_bytes", "cache_bytes"),
    [
        ({}, 1 << 40, 1 << 30),
        ({}, 1 << 30, 1 << 28),  # a quarter of the memory
        ({"kv_cache_memory_bytes": 5 * MIB}, 1 << 30, 5 * MIB),
        ({"kv_cache_memory_bytes": 5 * MIB + BLOCK_BYTES - 1}, 1 << 30, 5 * MIB),
        ({"kv_cache_memory_share": 0.25}, 1 << 30, 1 << 28),
        ({"kv_cache_memory_share": 1}, 1 << 30, 1 << 30),
    ],
)
def test_the_cache_takes_as_many_blocks_as_its_bytes_hold(options, memory_bytes, cache_bytes):
    config, _ = plan(memory_bytes, **options)
    assert config.num_blocks == cache_bytes // BLOCK_BYTES


def test_blocks_of_f32_cost_twice_as_much():
    assert plan(dtype="float32")[0].num_blocks * 2 == plan()[0].num_blocks


def test_what_a_block_costs_is_decided_by_the_dtype_of_the_cache():
    assert plan(dtype="float32", kv_cache_dtype="bfloat16")[0].num_blocks == plan()[0].num_blocks
    assert plan(kv_cache_dtype="float32")[0].num_blocks * 2 == plan()[0].num_blocks


def test_without_a_wish_the_context_is_the_models():
    assert plan()[0].max_model_len == 512


@pytest.mark.parametrize("wish", [None, 400])
def test_the_context_is_clamped_to_what_the_cache_holds(wish):
    config, clamped_from = plan(num_kv_blocks=10, max_model_len=wish)
    assert config.max_model_len == 160
    assert clamped_from == (wish or 512)


def test_a_context_that_just_fits_is_not_clamped():
    config, clamped_from = plan(num_kv_blocks=10, max_model_len=160)
    assert (config.max_model_len, clamped_from) == (160, None)


def test_more_context_than_the_model_knows_is_refused():
    with pytest.raises(ModelError, match="max_model_len 513 exceeds the model's context of 512"):
        plan(max_model_len=513)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_memory_bytes": 2 * BLOCK_BYTES - 1},
        {"kv_cache_memory_bytes": 1},
        {"num_kv_blocks": 0},
    ],
)
def test_a_cache_that_holds_nothing_is_refused(options):
    message = f"2 blocks of {BLOCK_BYTES} bytes, one of them reserved"
    with pytest.raises(ModelError, match=message):
        plan(**options)


def test_a_cache_larger_than_the_memory_is_refused():
    with pytest.raises(ModelError, match=f"exceeds the memory of {10 * BLOCK_BYTES} bytes"):
        plan(num_kv_blocks=10, memory_bytes=10 * BLOCK_BYTES)  # and the reserved one
    assert plan(num_kv_blocks=9, memory_bytes=10 * BLOCK_BYTES)[0].num_blocks == 10


def test_a_machine_without_memory_is_refused():
    with pytest.raises(ModelError, match="one of them reserved"):
        plan(memory_bytes=BLOCK_BYTES)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"block_size": 24}, "block_size"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 1000}, "max_num_seqs"),
        ({"watermark": -1.0}, "watermark"),
        ({"max_num_scheduled_tokens": 513}, "max_num_scheduled_tokens"),
        ({"target_itl_s": 0.0}, "target_itl_s"),
        ({"batching": "now and then"}, "batching"),
        ({"quantization": "int3"}, "quantization"),
        ({"tenant_weights": {"alice": 0}}, "alice"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options, field):
    with pytest.raises(ValueError, match=field):
        plan(**options)


SMALL = EngineOptions(
    dtype="float32",
    max_num_seqs=8,
    max_num_batched_tokens=32,
    block_size=16,
    num_kv_blocks=20,
    attention_kernel="reference",
)


async def test_a_built_engine_serves():
    seen = {"weights": [], "compile": []}
    checkpoint = RandomCheckpoint(num_hidden_layers=1)
    built = build_engine(
        checkpoint,
        SMALL,
        memory_bytes=1 << 30,
        eos_token_ids=[298, 299],
        weights_progress=lambda *done: seen["weights"].append(done),
        compile_progress=lambda *done: seen["compile"].append(done),
    )
    assert seen["weights"][-1] == (8, 8)
    # Two buckets, and the choice of tokens for eight sequences.
    assert seen["compile"] == [(1, 3), (2, 3), (3, 3)]
    assert built.num_buckets == 2
    num_weights = sum(math.prod(shape) for shape in checkpoint.shapes.values())
    assert built.memory.weights == num_weights * 4
    assert built.memory.kv_cache == 21 * BLOCK_BYTES  # half the layers, twice the bytes
    assert built.memory.workspace > 0
    assert built.memory.total == num_weights * 4 + 21 * BLOCK_BYTES + built.memory.workspace
    assert (built.memory.scratch, built.memory.available) == (0, 1 << 30)
    # The context of 512 is more than 20 blocks of 16 hold.
    assert (built.config.max_model_len, built.clamped_from) == (320, 512)
    assert built.model.eos_token_ids == (298, 299)
    limits = built.engine.limits
    assert (limits.max_model_len, limits.vocab_size, limits.max_num_seqs) == (320, 300, 8)
    assert (limits.max_num_queued_requests, limits.eos_token_ids) == (1024, (298, 299))
    built.engine.start()
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    [stream] = built.engine.submit([TokenRequest(prompt_token_ids=[1, 2, 3], params=params)])
    async with stream:
        token_ids = [token async for output in stream for token in output.new_token_ids]
    assert len(token_ids) == 5
    assert built.engine.stats().compiles_after_ready == 0
    await built.engine.stop(drain_timeout_s=5)
    assert (built.attention.kernel, built.config.attention_kernel) == ("reference", "reference")


def test_the_kernel_that_was_chosen_is_the_one_that_the_engine_is_built_for(monkeypatch):
    checkpoint, asked = RandomCheckpoint(num_hidden_layers=1), []

    def choose(wanted, **facts):
        asked.append((wanted, facts["platform"], facts["block_size"], facts["folder"].name))
        return KernelChoice(ready_kernel(), "for this test")

    monkeypatch.setattr(build, "choose_kernel", choose)
    use_compile_cache()
    built = build_engine(checkpoint, replace(SMALL, attention_kernel="auto"), memory_bytes=1 << 30)
    assert asked == [("auto", "cpu", 16, "kernels")]
    assert built.attention.reason == "for this test"
    assert built.config.attention_kernel == ready_kernel()
    block_bytes = kv_block_bytes(built.model, block_size=16, dtype="float32", kernel=ready_kernel())
    assert built.memory.kv_cache == 21 * block_bytes


@pytest.mark.parametrize("window", [None, 64])
def test_the_kernel_of_a_gpu_is_tested_for_what_the_model_needs(window, monkeypatch):
    checkpoint, asked = RandomCheckpoint(model_type="mistral", sliding_window=window), []

    def choose(wanted, *, gpu, **facts):
        asked.append((facts["platform"], gpu.kv_cache_dtype, gpu.head_dim, gpu.is_plain))
        raise KernelUnavailable("enough")

    monkeypatch.setattr(build, "choose_kernel", choose)
    monkeypatch.setattr(build.jax, "default_backend", lambda: "gpu")
    with pytest.raises(KernelUnavailable):
        build_engine(checkpoint, SMALL, memory_bytes=1 << 30)
    head_dim = ModelConfig.from_hf(checkpoint.hf_config).head_dim
    assert asked == [("gpu", "float32", head_dim, window is None)]


@pytest.mark.parametrize("library", [None, Path("library.so")])
def test_weights_of_eight_bits_are_packed_where_there_is_code_for_them(library, monkeypatch):
    """Whatever the instructions for bfloat16; and they are counted as they are."""
    choice = KernelChoice("reference", "for this test", library, can_project=False)
    monkeypatch.setattr(build, "choose_kernel", lambda wanted, **facts: choice)
    monkeypatch.setattr(build.native, "load", lambda library: NativeLibrary("none", print, count()))
    asked = []

    def load(model, checkpoint, **options):
        asked.append((options["packed"], options["quantization"]))
        return load_decoder(model, checkpoint, **options | {"packed": False})

    monkeypatch.setattr(build, "load_decoder", load)
    use_compile_cache()
    checkpoint = RandomCheckpoint(num_hidden_layers=1)
    options = replace(SMALL, quantization="int8")
    built = build_engine(checkpoint, options, memory_bytes=1 << 30)
    assert asked == [(library is not None, "int8")]
    # A byte for each number of a matrix, four for each row of it, for norms, and for the embedding.
    matrices = [shape for shape in checkpoint.shapes.values() if len(shape) == 2]
    (vocab, size), *layer = matrices
    expected = vocab * size * 4 + vocab * (size + 4) + sum(rows * (n + 4) for rows, n in layer)
    assert built.memory.weights == expected + 3 * size * 4


def test_eight_bit_floats_are_refused_where_nothing_multiplies_them():
    said = "quantization fp8 needs an NVIDIA GPU .* and this is cpu; int8 is for all devices"
    with pytest.raises(ModelError, match=said):
        build_engine(RandomCheckpoint(), replace(SMALL, quantization="fp8"), memory_bytes=1 << 30)


def test_eight_bit_floats_are_loaded_where_something_does(monkeypatch):
    asked = []

    def load(model, checkpoint, **options):
        asked.append(options["quantization"])
        raise ModelError("as far as this test goes")

    monkeypatch.setattr(build, "load_decoder", load)
    monkeypatch.setattr(build.fp8, "find_fault", lambda device: None)
    options = replace(SMALL, quantization="fp8", attention_kernel="reference")
    with pytest.raises(ModelError, match="as far as this"):
        build_engine(RandomCheckpoint(), options, memory_bytes=1 << 30)
    assert asked == ["fp8"]


@pytest.fixture
def planned(monkeypatch):
    """What is planned with a library whose threads keep four megabytes; then loading fails."""
    choice = KernelChoice("reference", "for this test", Path("library.so"))
    monkeypatch.setattr(build, "choose_kernel", lambda wanted, **facts: choice)
    monkeypatch.setattr(build.native, "load", lambda library: NativeLibrary("none", print, count()))
    monkeypatch.setattr(build, "scratch_bytes", lambda *_, packed: 4 * MIB)
    configs = []

    def plan_engine_here(*args, **options):
        config, clamped_from = plan_engine(*args, **options)
        configs.append(config)
        return config, clamped_from

    def load(*_, **options):
        raise ModelError("enough")

    monkeypatch.setattr(build, "plan_engine", plan_engine_here)
    monkeypatch.setattr(build, "load_decoder", load)
    return configs


def test_the_cache_gets_a_share_of_what_threads_leave(planned):
    options = replace(SMALL, num_kv_blocks=None, kv_cache_memory_share=0.5)
    memory_bytes = 4 * MIB + 2 * 21 * BLOCK_BYTES
    with pytest.raises(ModelError, match="enough"):
        build_engine(RandomCheckpoint(num_hidden_layers=1), options, memory_bytes=memory_bytes)
    assert planned[-1].num_blocks == 21  # of half the layers, and twice the bytes


def test_threads_that_take_all_memory_are_refused(planned):
    with pytest.raises(ModelError, match=r"steps take 4194304 of 4194304 bytes .* a smaller max_"):
        build_engine(RandomCheckpoint(num_hidden_layers=1), SMALL, memory_bytes=4 * MIB)


def test_a_kernel_that_was_asked_for_and_does_not_work_is_an_error(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="attention_kernel native does not work: there is no C"):
        build_engine(
            RandomCheckpoint(), replace(SMALL, attention_kernel="native"), memory_bytes=1 << 30
        )


def test_a_model_that_does_not_fit_its_checkpoint_is_refused_before_anything_is_compiled():
    checkpoint = RandomCheckpoint()
    checkpoint.hf_config = {**checkpoint.hf_config, "vocab_size": 301}
    compiled = []
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight has shape"):
        build_engine(
            checkpoint,
            replace(SMALL, max_model_len=64),
            memory_bytes=1 << 30,
            compile_progress=lambda *done: compiled.append(done),
        )
    assert compiled == []


@pytest.mark.parametrize(
    ("options", "reads_codes", "kept"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"keep_codes": False}, True, False),
        ({"quantization": "int8"}, True, False),
    ],
)
def test_codes_are_kept_beside_weights_that_stay_wide(options, reads_codes, kept, monkeypatch):
    if not can_project():
        pytest.skip("no compiler here, or no instructions for bfloat16")
    choose = build.choose_kernel

    def choose_kernel(wanted, **facts):
        return replace(choose(wanted, **facts), reads_codes=reads_codes)

    monkeypatch.setattr(build, "choose_kernel", choose_kernel)
    use_compile_cache()
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 320}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
    wishes = replace(SMALL, dtype="bfloat16", attention_kernel="auto", block_size=32, **options)
    checkpoint = CodedCheckpoint(**sizes, **heads)
    memory = build_engine(checkpoint, wishes, memory_bytes=1 << 30).memory
    # Half a byte of code, and four of scale and minimum for 32; one byte in the head, and as many.
    in_layers, in_head = 64 * (3 * 64 + 64 + 2 * 64 + 64), 64 * 320
    codes = in_layers * 5 // 8 + in_head * 9 // 8
    assert memory.codes == (codes if kept else 0)
    parts = memory.weights + memory.codes + memory.kv_cache + memory.workspace + memory.scratch
    assert memory.total == parts
