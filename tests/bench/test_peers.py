import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import orjson
import pytest
from click.testing import CliRunner, Result

from bench import peers as peers_module
from bench.comparison import runs, sides
from bench.comparison.figures import ProductLimit
from bench.peers import GOLDEN, peers
from bench.server_process import ServerProcess
from bench_server import FakeServe

LIMIT = ProductLimit(bf16_gflops=400, int8_gflops=700, matrix_weights=10**8)


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, Path]:
    """What the command line names."""
    paths = {name: tmp_path / name for name in ("llama-server", "python", "m.gguf")}
    for path in paths.values():
        path.touch()
    return paths


def install(monkeypatch: pytest.MonkeyPatch, fake: FakeServe) -> None:
    monkeypatch.setattr(runs, "running_server", fake.run)
    monkeypatch.setattr(runs, "running_peer", fake.run)
    monkeypatch.setattr(runs, "LEFT_S", 0.0)
    monkeypatch.setattr(sides, "find_headrace", lambda: "headrace")
    monkeypatch.setattr(peers_module, "measure_limit", lambda _: LIMIT)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeServe:
    fake = FakeServe(pace=lambda *_: 0.001, max_model_len=256)
    install(monkeypatch, fake)
    return fake


def run(programs: dict[str, Path], *arguments: str) -> Result:
    model = str(programs["m.gguf"])
    return CliRunner().invoke(peers, ["--quick", "--model", model, *arguments])


def test_sides_are_compared_and_the_result_is_written(
    fake: FakeServe, programs: dict[str, Path], tmp_path: Path
):
    json_file, chart = tmp_path / "out" / "peers.json", tmp_path / "out" / "peers.svg"
    result = run(
        programs,
        *("--llama-server", str(programs["llama-server"]), "--rounds", "2"),
        *("--output-json", str(json_file), "--output-svg", str(chart)),
        *("--", "--dtype", "bfloat16"),
    )
    assert result.exit_code == 0, result.output
    document = orjson.loads(json_file.read_bytes())
    assert document["schema"] == "headrace.bench.peers/1"
    assert [side["name"] for side in document["sides"]] == ["headrace", "llama.cpp"]
    assert [(run["side"], run["round"]) for run in document["runs"]] == [
        *(("headrace", 0), ("llama.cpp", 0), ("llama.cpp", 1), ("headrace", 1))
    ]
    assert [limit["bf16_gflops"] for limit in document["limits"]] == [400, 400]
    assert document["headrace_over"]["llama.cpp"]["1 stream"]["output_tokens_per_s"] > 0
    assert document["settings"]["streams"] == [1, 2]
    assert document["failures"] == {}
    assert str(tmp_path) not in json_file.read_text()
    assert {"median ITL at 1 stream: at most 1 times llama.cpp"} <= {
        verdict["demand"] for verdict in document["verdicts"]
    }
    ElementTree.parse(chart)
    assert "long-prompt" in result.stdout
    ours = [command for command in fake.commands if command[0] == "headrace"]
    assert all(command[-2:] == ["--dtype", "bfloat16"] for command in ours)


def test_a_part_of_the_workloads_can_be_chosen(fake: FakeServe, programs: dict[str, Path]):
    result = run(programs, "--workloads", "prefill", "--workloads", "open", "--no-limit")
    assert result.exit_code == 0, result.output
    assert {body["max_tokens"] for _, body in fake.bodies} == {1, 2, 4}  # 4: of the warm-up
    assert "long-prompt" not in result.stdout
    assert "product limit, round" not in result.stdout


def test_a_peer_that_fails_is_reported_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, programs: dict[str, Path]
):
    fake = FakeServe(pace=lambda *_: 0.001, max_model_len=256)
    install(monkeypatch, fake)
    real = peers_module.list_sides

    def with_broken_peer(*arguments: object, **options: object) -> list[sides.Side]:
        broken = sides.Side(name="vLLM", kind="server", command=("vllm", "--broken"))
        return [*real(*arguments, **options), broken]

    monkeypatch.setattr(peers_module, "list_sides", with_broken_peer)
    result = run(programs, "--rounds", "2", "--workloads", "streams")
    assert result.exit_code == 0, result.output
    assert "vLLM, round 1: the server ended before it was ready" in result.stdout
    assert "no such flag" in result.stdout
    # It is not tried again.
    assert [command[0] for command in fake.commands] == ["headrace", "vllm", "headrace"]


def test_requests_of_ours_that_fail_make_the_command_fail(
    monkeypatch: pytest.MonkeyPatch, programs: dict[str, Path]
):
    refusing = FakeServe(refuse=lambda body, _: 503 if body["max_tokens"] == 2 else None)
    install(monkeypatch, refusing)
    result = run(programs, "--workloads", "open")
    assert result.exit_code == 1
    assert "requests failed (http 503: 8)" in result.output


def test_ours_that_does_not_start_makes_the_command_fail(
    fake: FakeServe, programs: dict[str, Path]
):
    result = run(programs, "--workloads", "open", "--", "--broken")
    assert result.exit_code == 1
    assert "requests failed (headrace: 1); first: the server ended before" in result.output


def test_golden_answers_can_be_named(fake: FakeServe, programs: dict[str, Path], tmp_path: Path):
    golden = tmp_path / "golden.json"
    case = {"prompt_ids": [7], "output_ids": [7, 8], "margins": [1.0, 1.0]}
    golden.write_bytes(orjson.dumps({"cases": [case]}))
    # The stand-in repeats the first token of the prompt: 7, 7.
    result = run(programs, "--workloads", "prefill", "--golden", str(golden))
    assert "MISSED share of golden answers that hold in bfloat16: 0" in result.stdout
    assert "0/0 of 1" in result.stdout


def test_the_golden_answers_of_the_default_model_are_at_hand_in_a_checkout(
    fake: FakeServe, monkeypatch: pytest.MonkeyPatch, programs: dict[str, Path]
):
    assert GOLDEN.exists()
    monkeypatch.setattr(peers_module, "find_default_model", lambda: programs["m.gguf"])
    result = CliRunner().invoke(peers, ["--quick", "--workloads", "prefill"])
    assert "of 12" in result.stdout
    assert "of 12" not in run(programs, "--workloads", "prefill").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--streams", "1,x"], "is not a list"),
        (["--streams", "0"], "positive"),
        (["--streams", "2,2"], "named once"),
        (["--vllm-python", "missing"], "does not exist"),
        (["--workloads", "other"], "is not one of"),
    ],
)
def test_what_makes_no_sense_is_refused(
    programs: dict[str, Path], arguments: list[str], message: str
):
    result = run(programs, *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_sigterm_ends_it_as_an_error_would_so_that_servers_are_stopped(
    fake: FakeServe, monkeypatch: pytest.MonkeyPatch, programs: dict[str, Path]
):
    before = signal.getsignal(signal.SIGTERM)
    stopped = []

    @contextmanager
    def interrupted(*arguments: object, **options: object) -> Iterator[ServerProcess]:
        try:
            with fake.run(*arguments, **options) as server:
                signal.raise_signal(signal.SIGTERM)
                yield server
        finally:
            stopped.append(True)

    monkeypatch.setattr(runs, "running_server", interrupted)
    result = run(programs, "--workloads", "prefill")
    assert result.exit_code == 128 + signal.SIGTERM
    assert stopped == [True]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_peer_without_its_model_is_refused(fake: FakeServe, programs: dict[str, Path]):
    result = run(programs, "--vllm-python", str(programs["python"]))
    assert result.exit_code == 2
    assert "need the directory of a model" in result.output
