from pathlib import Path
from xml.etree import ElementTree

import orjson
import pytest
from click.testing import CliRunner

from bench.policies import policies
from bench_server import FakeServe, flag_value

# Two batches of two requests, so that all that is left is the time of the client.
TINY = ("--quick", "--batch-size", "2", "--output-mean", "2", "--output-cap", "4")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeServe:
    fake = FakeServe()
    fake.install(monkeypatch)
    return fake


def modes_of(fake: FakeServe) -> list[str | None]:
    return [flag_value(command, "--batching") for command in fake.commands]


def test_each_mode_gets_the_same_requests_each_round(fake: FakeServe, tmp_path: Path):
    path, chart = tmp_path / "out" / "p.json", tmp_path / "charts" / "p.svg"
    result = CliRunner().invoke(
        policies,
        [
            *(*TINY, "--rounds", "2", "--request-rate", "500", "--dtype", "float32"),
            *("--output-json", str(path), "--output-svg", str(chart)),
        ],
    )
    assert result.exit_code == 0, result.output
    assert modes_of(fake) == [
        *("continuous", "dynamic", "static"),
        *("dynamic", "static", "continuous"),
    ]
    assert all(flag_value(command, "--max-num-seqs") == "2" for command in fake.commands)
    assert all("float32" in command for command in fake.commands)
    # A warm-up of one batch, then four workloads of two.
    sent = [
        sorted((body["prompt"], body["max_tokens"]) for server, body in fake.bodies if server == n)
        for n in range(6)
    ]
    assert len(sent[0]) == 2 + 4 * 4
    assert all(bodies == sent[0] for bodies in sent)
    assert len({tuple(prompt) for prompt, _ in sent[0]}) == len(sent[0])
    assert "exponential, burst: continuous over static" in result.stdout
    document = orjson.loads(path.read_bytes())
    assert document["schema"] == "headrace.bench.policies/1"
    assert len(document["runs"]) == 2 * 3 * 4
    assert {run["request_rate"] for run in document["runs"]} == {None, 500}
    assert len(document["workloads"]) == 4
    assert document["settings"]["batch_size"] == 2
    ElementTree.parse(chart)


def test_poisson_arrivals_come_at_a_share_of_the_rate_of_the_burst(fake: FakeServe, tmp_path: Path):
    path = tmp_path / "p.json"
    arguments = [*TINY, "--lengths", "uniform", "--output-json", str(path)]
    result = CliRunner().invoke(policies, arguments)
    assert result.exit_code == 0, result.output
    document = orjson.loads(path.read_bytes())
    burst, poisson = (run for run in document["runs"] if run["mode"] == "continuous")
    assert poisson["request_rate"] == pytest.approx(0.8 * burst["summary"]["requests_per_s"])
    assert {run["request_rate"] for run in document["runs"]} == {None, poisson["request_rate"]}


def test_the_highest_rate_at_an_objective_is_looked_for_in_each_mode(
    fake: FakeServe, tmp_path: Path
):
    path = tmp_path / "p.json"
    arguments = [*TINY, "--lengths", "exponential", "--arrivals", "burst", "--num-batches", "1"]
    arguments += ["--slo", "ttft_p99=0.001", "--probe-seconds", "0.001"]
    result = CliRunner().invoke(policies, [*arguments, "--output-json", str(path)])
    assert result.exit_code == 0, result.output
    assert modes_of(fake) == 2 * ["continuous", "dynamic", "static"]
    document = orjson.loads(path.read_bytes())
    assert document["settings"]["slo"] == {"ttft_p99_ms": 0.001, "itl_p99_ms": None}
    [workload] = document["workloads"]
    fastest = max(mode["requests_per_s"] for mode in workload["modes"].values())
    for mode in ("continuous", "dynamic", "static"):
        assert document["objective"][mode]["highest_rate"] is None  # nothing is that fast
        probes = document["objective"][mode]["probes"]
        assert (len(probes), probes[0]["rate"]) == (10, fastest)
    assert "MISSED at the objective, at least 5 times the request rate of static" in result.stdout


def test_a_request_that_fails_makes_the_command_fail(monkeypatch: pytest.MonkeyPatch):
    def refuse(body: dict, command: list[str]) -> int | None:
        is_warm_up = body["max_tokens"] == 2
        return 500 if flag_value(command, "--batching") == "static" and not is_warm_up else None

    FakeServe(refuse=refuse).install(monkeypatch)
    arguments = [*TINY, "--lengths", "uniform", "--arrivals", "poisson", "--request-rate", "500"]
    result = CliRunner().invoke(policies, arguments)
    assert result.exit_code == 1
    assert "requests failed (http 500: " in result.output


def test_a_burst_without_any_answer_ends_the_command(monkeypatch: pytest.MonkeyPatch):
    FakeServe(refuse=lambda body, _: None if len(body["prompt"]) == 4 else 500).install(monkeypatch)
    result = CliRunner().invoke(policies, [*TINY, "--input-range", "4:5000", "--seed", "2"])
    assert result.exit_code == 1
    assert "no answer: in the burst: http 500" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input-range", "5"], "not a range such as 16:128"),
        (["--input-range", "9:5"], "input_max=5"),
        (["--slo", "ttft=1"], "must be ttft_p99=MS or itl_p99=MS"),
        (["--slo", "ttft_p99=1", "--arrivals", "poisson", "--request-rate", "1"], "add --arrivals"),
        (["--arrivals", "poisson"], "need a request rate"),
        (["--output-mean", "500"], "self.cap=384"),
    ],
)
def test_a_wrong_command_line_is_explained(arguments: list[str], message: str):
    result = CliRunner().invoke(policies, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
