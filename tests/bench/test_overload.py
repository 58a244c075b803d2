from collections.abc import Callable, Sequence
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner

from bench.overload import OverloadPlan, OverloadResult, overload, overload_rows, refusal_times
from bench.stream import RequestRecord
from bench.summary import Distribution
from bench_server import FakeServe

SHORT = ("--quick", "--duration", "0.3", "--settle", "0.05", "--num-probes", "3")


def make_plan(**fields: object) -> OverloadPlan:
    values = {
        "batch_size": 4,
        "num_queued": 2,
        "input_len": 8,
        "output_len": 10,
        "factor": 2.0,
        "duration_s": 60.0,
        "settle_s": 20.0,
        "num_probes": 5,
        "seed": 0,
        "vocab_size": 5000,
    }
    return OverloadPlan(**{**values, **fields})


def make_result(**fields: object) -> OverloadResult:
    quiet = Distribution(mean=2, p50=2, p90=3, p99=4, max=12)
    values = {
        "peak_tokens_per_s": 100.0,
        "offered_rate": 20.0,
        "goodput_tokens_per_s": 96.0,
        "num_answered": 700,
        "num_refused": 600,
        "overload_refusal_ms": None,
        "quiet_refusal_ms": quiet,
        "num_without_retry_after": 0,
        "num_probes_taken": 1,
    }
    return OverloadResult(**{**values, **fields})


def test_arrivals_last_for_settling_and_window():
    arrivals = make_plan().arrivals(10.0)
    assert arrivals[-1] < 80
    assert 720 <= len(arrivals) <= 880


def test_demands_are_judged():
    assert [verdict.is_met for verdict in make_result().verdicts()] == [True, True, True]
    bad = make_result(
        goodput_tokens_per_s=94.0,
        quiet_refusal_ms=None,
        num_without_retry_after=1,
    )
    assert [verdict.is_met for verdict in bad.verdicts()] == [False, False, False]
    assert make_result(peak_tokens_per_s=0.0).goodput_share is None


def test_each_part_is_a_row():
    assert overload_rows(make_plan(), make_result()) == [
        ["peak", "100.0", "10.00", "", "", ""],
        ["2 times the peak: 20.00 req/s", "96.0", "9.60", "700", "600", "-"],
        ["full, one request at a time", "", "", "1", "4", "2.0/4.0/12.0"],
    ]


def test_the_client_being_late_is_not_the_servers_time():
    late = RequestRecord(index=0, start_s=0.0, lag_s=0.5, end_s=0.504)
    times = refusal_times([late])
    assert times is not None
    assert times.max == pytest.approx(4)


class Room:
    """Refuses when more requests than it has places are unfinished."""

    def __init__(self, places: int) -> None:
        self.fake = FakeServe(pace=lambda *_: 0.002, refuse=self.refuse)
        self.places = places

    def refuse(self, _body: dict, _command: Sequence[str]) -> int | None:
        return 429 if self.fake.num_unfinished >= self.places else None


def install(monkeypatch: pytest.MonkeyPatch, places: int) -> FakeServe:
    fake = Room(places).fake
    fake.install(monkeypatch)
    return fake


def test_goodput_and_refusals_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    fake = install(monkeypatch, places=8)  # --quick has 4 rows and 4 that wait
    path = tmp_path / "o.json"
    result = CliRunner().invoke(overload, [*SHORT, "--output-json", str(path)])
    assert result.exit_code == 0, result.output
    assert [command[-4:] for command in fake.commands] == [
        ["--max-num-seqs", "4", "--max-num-queued-reqs", "1024"],
        ["--max-num-seqs", "4", "--max-num-queued-reqs", "4"],
    ]
    document = orjson.loads(path.read_bytes())
    assert document["peak_tokens_per_s"] > 0
    assert document["offered_rate"] == pytest.approx(2 * document["peak_tokens_per_s"] / 8)
    assert document["goodput_tokens_per_s"] > 0
    assert document["num_without_retry_after"] == 0
    assert document["num_probes_taken"] == 0
    assert document["quiet_refusal_ms"]["max"] > 0
    assert document["failures"] == {}
    assert "goodput at least 95% of the peak" in result.stdout


def test_a_refusal_at_the_peak_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, places=4)
    result = CliRunner().invoke(overload, SHORT)
    assert result.exit_code == 1
    assert "requests failed (http 429: " in result.output


def always(status: int | None) -> Callable[[dict, Sequence[str]], int | None]:
    """After the warm-up, whose outputs are of two tokens."""
    return lambda body, _: None if body["max_tokens"] == 2 else status


def test_a_server_that_never_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch):
    FakeServe(pace=lambda body, _: 0.002 if body["max_tokens"] < 20 else 0).install(monkeypatch)
    result = CliRunner().invoke(overload, SHORT)
    assert result.exit_code == 1
    assert "never full: 10 requests fitted" in result.output


def test_a_server_that_answers_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch):
    FakeServe(refuse=always(500)).install(monkeypatch)
    result = CliRunner().invoke(overload, [*SHORT, "--duration", "0.01"])
    assert result.exit_code == 1
    assert "Error: http 500" in result.output
