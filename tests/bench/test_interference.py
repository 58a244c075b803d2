from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner

from bench.interference import InterferencePlan, InterferenceResult, interference
from bench.summary import Distribution
from bench_server import FakeServe, flag_value


def milliseconds(p50: float, p99: float) -> Distribution:
    return Distribution(mean=p50, p50=p50, p90=p99, p99=p99, max=p99)


def make_result(target_itl_ms: float | None = 80.0) -> InterferenceResult:
    return InterferenceResult(
        target_itl_ms=target_itl_ms,
        long_len=2000,
        idle_ms=milliseconds(40, 50),
        beside_ms=milliseconds(80, 90),
        prefill_s=2.5,
        alone_s=1.0,
    )


def test_the_budget_leaves_a_prompt_the_rest_of_each_step():
    result = make_result()
    # Alone 2000 tok/s. Of each 80 ms a decode takes 40, so half of the speed is left.
    assert result.budget_tokens_per_s == 1000
    assert result.speed_share == pytest.approx(2000 / 2.5 / 1000)
    assert result.itl_ratio == 90 / 50
    assert [verdict.is_met for verdict in result.verdicts()] == [True, False]
    assert result.row() == [
        *("80.0 ms", "40.0/50.0", "80.0/90.0/90.0", "1.80x"),
        *("2.50", "800", "2000", "1000", "80%"),
    ]


def test_without_a_budget_there_is_nothing_to_reach():
    result = make_result(None)
    assert result.budget_tokens_per_s is None
    assert result.speed_share is None
    assert result.row()[-2:] == ["-", "-"]


def test_a_target_below_a_decode_step_leaves_nothing():
    result = make_result(30.0)
    assert result.budget_tokens_per_s == 0
    assert result.speed_share is None
    assert result.verdicts()[1].is_met is False


def test_the_long_prompt_fills_the_context_and_no_prompt_is_sent_twice():
    plan = InterferencePlan(
        num_streams=3,
        input_len=8,
        long_len=None,
        idle_s=1.0,
        repeats=2,
        seed=0,
        vocab_size=5000,
    )
    long_prompts = plan.long_prompts(1000)
    assert [len(request.prompt) for request in long_prompts] == [984] * 4
    streams = plan.streams(0, 1000) + plan.streams(1, 1000)
    assert [request.output_len for request in streams] == [992] * 6
    prompts = {tuple(request.prompt) for request in (*long_prompts, *streams)}
    assert len(prompts) == 10


def pace(body: dict, command: list[str]) -> float:
    """A token takes 2 ms; the first one of a long prompt takes 50 ms, with a budget 100."""
    if body["max_tokens"] > 1:
        return 0.002
    return 0.1 if "--target-itl-ms" in command else 0.05


def test_both_servers_are_measured_and_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    fake = FakeServe(pace=pace, max_model_len=2000)
    fake.install(monkeypatch)
    path = tmp_path / "i.json"
    result = CliRunner().invoke(
        interference,
        ["--quick", "--long-len", "300", "--idle-seconds", "0.1", "--output-json", str(path)],
    )
    assert result.exit_code == 0, result.output
    document = orjson.loads(path.read_bytes())
    without, with_budget = document["servers"]
    assert without["target_itl_ms"] is None
    # By default the target is twice the median of what a token takes when nothing disturbs.
    target = flag_value(fake.commands[1], "--target-itl-ms")
    assert target is not None
    assert float(target) == pytest.approx(2 * without["idle_ms"]["p50"], abs=1e-3)
    assert without["alone_s"] >= 0.05
    assert with_budget["prefill_s"] >= 0.1
    assert with_budget["long_len"] == 300
    assert len(document["verdicts"]) == 2
    long_bodies = [body for _, body in fake.bodies if len(body["prompt"]) == 300]
    assert len(long_bodies) == 4
    assert "P99 ITL beside the prompt at most 2 times the idle one" in result.stdout


def test_streams_that_end_too_early_end_the_measurement(monkeypatch: pytest.MonkeyPatch):
    FakeServe(pace=pace, max_model_len=20).install(monkeypatch)
    result = CliRunner().invoke(
        interference, ["--quick", "--long-len", "10", "--idle-seconds", "0.1"]
    )
    assert result.exit_code == 1
    assert "stream ended: before the prompt was done" in result.output


def test_a_server_that_lists_no_context_is_not_measured(monkeypatch: pytest.MonkeyPatch):
    FakeServe(max_model_len=5).install(monkeypatch)
    result = CliRunner().invoke(interference, ["--quick"])
    assert result.exit_code == 1
    assert "lists a max_model_len of 5" in result.output
