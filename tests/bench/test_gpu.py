from dataclasses import replace

import orjson
import pytest
from click.testing import CliRunner

from bench import gpu as bench_gpu
from bench.gateway_under_test import GatewayFailed
from bench.gpu import DRY, FULL, GpuReport, gpu, measure_gpu
from bench.gpu_engine import RunFigures
from bench.gpu_kernels import Ceilings


class FakeEngine:
    """Every run takes a second: 10 steps of 100 ms."""

    start_s = 5.0
    flop_per_token = 25e9

    def __init__(self, model, **options):
        self.options = options

    def close(self):
        """Nothing is held."""

    def floor_bytes(self, num_seqs, context):
        return 50_000_000

    def run(self, lengths, *, batching="continuous", decode_steps=1):
        return RunFigures(
            seconds=1.0,
            prompt_tokens=sum(prompt for prompt, _ in lengths),
            output_tokens=sum(output for _, output in lengths),
            steps=10,
            step_ms=100.0 if decode_steps == 1 else 80.0,
            waited_ms=60.0,
            device_ms=75.0,
        )


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """A device that reads a gigabyte a second and whose kernels pass their tests."""
    monkeypatch.setattr(bench_gpu, "find_gpu_fault", lambda *_, **__: None)
    monkeypatch.setattr(bench_gpu, "measure_ceilings", lambda sizes: Ceilings(1e9, 1e12))
    monkeypatch.setattr(bench_gpu, "EngineUnderTest", FakeEngine)

    monkeypatch.setattr(bench_gpu, "measure_kernels", fake_kernels)
    monkeypatch.setattr(bench_gpu, "measure_products", lambda *_: [{"weights": "fp8", "rows": 8}])
    monkeypatch.setattr(bench_gpu, "measure_gateway", fake_gateway)


def fake_kernels(kernel, dtype, sizes, ceilings):
    row = {"kernel": kernel, "kv_cache_dtype": dtype, "phase": "decode", "head_dim": 64}
    row |= {"sequences": 1, "context": 20}
    yield {**row, "config": "Slow()", "microseconds": 9.0}
    yield {**row, "config": "Large()", "error": "too large"}
    yield {**row, "config": "Fast()", "microseconds": 6.0}


def fake_gateway(engine, streams, *, prompt_len, output_len):
    for num_streams in streams:
        yield {"streams": num_streams, "tokens": f"{prompt_len}/{output_len}", "through": "sse"}


def measure(path, plan=DRY):
    report = GpuReport(path, {"schema": "x"})
    measure_gpu(plan, report, dry_run=True)
    assert orjson.loads(path.read_bytes()) == {"schema": "x", **report.sections}
    return report.sections


def test_everything_in_the_plan_is_measured(tmp_path):
    sections = measure(tmp_path / "gpu.json")
    assert list(sections) == [
        *("self_tests", "ceilings", "kernels", "tuning", "products", "engine", "gateway")
    ]
    assert sections["self_tests"] == [
        {"kernel": "triton", "kv_cache_dtype": "bfloat16", "fault": None}
    ]
    assert len(sections["kernels"]) == 3
    ((fast, slow, large),) = [row["ranked"] for row in sections["tuning"]]
    assert (fast["config"], slow["config"], large["config"]) == ("Fast()", "Slow()", "Large()")
    assert [row["run"] for row in sections["engine"]] == [
        "start",
        "1 decodes",
        "1 decodes, 2 steps at once",
        "2 decodes",
        "2 decodes, 2 steps at once",
        "2 prompts of 16",
        "3 x 8/4",
        "4 x 2..8, continuous",
        "4 x 2..8, static",
    ]
    assert [row["streams"] for row in sections["gateway"]] == [1, 2]


def test_the_full_plan_has_every_model_batch_and_stream():
    models = {model.name: model for model in FULL.models}
    assert set(models) == {"qwen3-0.6b", "qwen3-8b", "llama-3-8b"}
    assert models["qwen3-0.6b"].decode_batches == (1, 8, 64, 256)
    assert models["qwen3-8b"].same == (256, 1024, 1024)
    assert models["qwen3-0.6b"].mixed == 256
    assert models["qwen3-0.6b"].mixed_lengths == (100, 1024)
    assert models["qwen3-0.6b"].streams == (1, 8, 64, 256)


def test_prompts_are_compared_with_what_a_product_reaches(tmp_path):
    row = measure(tmp_path / "gpu.json")["engine"][5]
    # 32 tokens in a second at 25 gigaflop, of a teraflop a second.
    assert (row["prompt_tokens_per_s"], row["share_of_product"]) == (32.0, 0.8)


def test_a_gateway_that_fails_does_not_end_the_model(tmp_path, monkeypatch):
    def broken(engine, streams, *, prompt_len, output_len):
        yield {"streams": 1}
        raise GatewayFailed("refused")

    monkeypatch.setattr(bench_gpu, "measure_gateway", broken)
    sections = measure(tmp_path / "gpu.json")
    assert sections["gateway"] == [{"model": "tiny", "kernel": "reference", "streams": 1}]
    assert sections["failed"] == [{"what": "gateway of tiny", "error": "refused"}]
    assert sections["engine"][-1]["run"] == "4 x 2..8, static"


def test_a_model_that_fails_does_not_end_the_run(tmp_path, monkeypatch):
    class Broken(FakeEngine):
        def run(self, lengths, *, batching="continuous"):
            raise RuntimeError("out of memory")

    monkeypatch.setattr(bench_gpu, "EngineUnderTest", Broken)
    sections = measure(tmp_path / "gpu.json")
    assert sections["failed"] == [{"what": "tiny", "error": "out of memory"}]
    assert [row["run"] for row in sections["engine"]] == ["start"]


def test_a_decode_step_is_compared_with_what_it_must_read(tmp_path):
    row, at_once = measure(tmp_path / "gpu.json")["engine"][1:3]
    # 50 MB at 1 GB/s are 50 ms, half of the step. 8 tokens in a second.
    assert (row["floor_ms"], row["share_of_floor"]) == (50.0, 0.5)
    assert row["output_tokens_per_s"] == 8.0
    # The device works for 75 of the 100 ms.
    assert row["gap_share"] == 0.25
    # Without the host between the steps, for 75 of 80.
    assert at_once["gap_share"] == 1 - 75 / 80


def test_a_kernel_with_a_fault_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_gpu, "find_gpu_fault", lambda *_, **__: "it hangs")
    sections = measure(tmp_path / "gpu.json")
    assert sections["self_tests"][0]["fault"] == "it hangs"
    assert "kernels" not in sections


def test_what_does_not_fit_into_the_time_is_named(tmp_path):
    sections = measure(tmp_path / "gpu.json", replace(DRY, seconds=-1.0))
    assert sections["skipped"] == [
        {"what": "more of kernel triton bfloat16"},
        {"what": "tiny"},
    ]
    assert "engine" not in sections


def test_without_a_gpu_only_a_dry_run_is_possible(tmp_path):
    output = str(tmp_path / "gpu.json")
    refused = CliRunner().invoke(gpu, ["--output", output])
    assert refused.exit_code == 1
    assert "JAX sees no GPU here; --dry-run needs none" in refused.output
    shown = CliRunner().invoke(gpu, ["--dry-run", "--output", output])
    assert shown.exit_code == 0, shown.output
    document = orjson.loads((tmp_path / "gpu.json").read_bytes())
    assert document["schema"] == "headrace.bench.gpu/1"
    assert document["dry_run"] is True
    assert "3 x 8/4" in shown.output
    # What is measured is told at once, and what belongs into the tuning table at the end.
    assert "engine: model=tiny kernel=reference run=start seconds=5\n" in shown.output
    assert '("decode", 64): (\n        Fast(),  # 1.00\n        Slow(),  # 1.50' in shown.output
