from dataclasses import replace

import orjson
import pytest
from click.testing import CliRunner

from bench import gpu as bench_gpu
from bench.gpu import DRY, GpuReport, gpu, measure_gpu
from bench.gpu_engine import RunFigures
from bench.gpu_kernels import Ceilings


class FakeEngine:
    """Every run takes a second: 10 steps of 100 ms."""

    start_s = 5.0

    def __init__(self, model, **options):
        self.options = options

    def floor_bytes(self, num_seqs, context):
        return 50_000_000

    def run(self, lengths, *, batching="continuous"):
        return RunFigures(
            seconds=1.0,
            prompt_tokens=sum(prompt for prompt, _ in lengths),
            output_tokens=sum(output for _, output in lengths),
            steps=10,
            step_ms=100.0,
            waited_ms=60.0,
        )


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """A device that reads a gigabyte a second and whose kernels pass their tests."""
    monkeypatch.setattr(bench_gpu, "find_gpu_fault", lambda *_, **__: None)
    monkeypatch.setattr(bench_gpu, "measure_ceilings", lambda sizes: Ceilings(1e9, 1e12))
    monkeypatch.setattr(bench_gpu, "EngineUnderTest", FakeEngine)

    def rank(kernel, dtype, sizes, ceilings):
        yield {"kernel": kernel, "microseconds": 7.0}
        yield {"kernel": kernel, "error": "too large"}

    monkeypatch.setattr(bench_gpu, "rank_kernels", rank)


def measure(path, plan=DRY):
    report = GpuReport(path, {"schema": "x"})
    measure_gpu(plan, report, dry_run=True)
    assert orjson.loads(path.read_bytes()) == {"schema": "x", **report.sections}
    return report.sections


def test_everything_in_the_plan_is_measured(tmp_path):
    sections = measure(tmp_path / "gpu.json")
    assert list(sections) == ["self_tests", "ceilings", "kernels", "engine"]
    assert sections["self_tests"] == [
        {"kernel": "triton", "kv_cache_dtype": "bfloat16", "fault": None}
    ]
    assert len(sections["kernels"]) == 2
    assert [row["run"] for row in sections["engine"]] == [
        "start",
        "1 decodes",
        "2 decodes",
        "3 x 8/4",
        "4 x 2..8, continuous",
        "4 x 2..8, static",
    ]


def test_a_decode_step_is_compared_with_what_it_must_read(tmp_path):
    row = measure(tmp_path / "gpu.json")["engine"][1]
    # 50 MB at 1 GB/s are 50 ms, half of the step. 8 tokens in a second.
    assert (row["floor_ms"], row["share_of_floor"]) == (50.0, 0.5)
    assert row["output_tokens_per_s"] == 8.0


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
