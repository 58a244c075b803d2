from collections.abc import Sequence
from pathlib import Path

import click
import orjson
import pytest
from click.testing import CliRunner

from bench.own_server import BenchSetup, measuring_command
from bench.scenario import PlannedRequest, Sender
from bench.stream import RequestRecord
from bench_server import FakeServe


async def send_one(sender: Sender) -> list[RequestRecord]:
    return await sender.send_all([PlannedRequest(prompt=[1, 2], output_len=2)])


@measuring_command(quick={"rounds": 1})
@click.option("--rounds", type=int, default=5)
def probe(setup: BenchSetup, *, rounds: int) -> None:
    """Send a request in every round."""
    records = [setup.measure(["--round", str(number)], send_one)[0] for number in range(rounds)]
    setup.check(records, expected=["http 429"])
    setup.finish({"rounds": rounds}, {"tokens": [record.output_tokens for record in records]})


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeServe:
    fake = FakeServe()
    fake.install(monkeypatch)
    return fake


def test_each_measurement_has_a_server_of_its_own(fake: FakeServe, tmp_path: Path):
    path = tmp_path / "result.json"
    result = CliRunner().invoke(
        probe,
        [
            "--model",
            "m",
            "--rounds",
            "2",
            "--output-json",
            str(path),
            "--seed",
            "7",
            "--dtype",
            "x",
        ],
    )
    assert result.exit_code == 0, result.output
    assert fake.commands == [
        ["headrace", "serve", "m", "--dtype", "x", "--round", "0"],
        ["headrace", "serve", "m", "--dtype", "x", "--round", "1"],
    ]
    document = orjson.loads(path.read_bytes())
    assert document["schema"] == "headrace.bench.probe/1"
    assert document["settings"] == {"seed": 7, "rounds": 2}
    assert document["tokens"] == [2, 2]
    assert document["failures"] == {}
    assert "machine" in document["environment"]


def test_servers_can_run_together(fake: FakeServe):
    @measuring_command(quick={})
    def pair(setup: BenchSetup) -> None:
        async def send_both(senders: Sequence[Sender]) -> None:
            for sender in reversed(senders):
                setup.check(await send_one(sender))

        setup.measure_together([["--first"], ["--second"]], send_both)

    result = CliRunner().invoke(pair, ["--dtype", "x"])
    assert result.exit_code == 0, result.output
    assert [command[-3:] for command in fake.commands] == [
        ["--dtype", "x", "--first"],
        ["--dtype", "x", "--second"],
    ]
    assert [server for server, _ in fake.bodies] == [1, 0]


def test_the_quick_preset_changes_defaults_and_no_choice(fake: FakeServe):
    assert CliRunner().invoke(probe, ["--quick"]).exit_code == 0
    assert len(fake.commands) == 1
    assert CliRunner().invoke(probe, ["--rounds", "2", "--quick"]).exit_code == 0
    assert len(fake.commands) == 3


def test_a_request_that_fails_makes_the_command_fail_after_the_result_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    FakeServe(refuse=lambda *_: 400).install(monkeypatch)
    path = tmp_path / "result.json"
    result = CliRunner().invoke(probe, ["--quick", "--output-json", str(path)])
    assert result.exit_code == 1
    assert "Error: requests failed (http 400: 1); first: http 400" in result.output
    assert orjson.loads(path.read_bytes())["failures"] == {"http 400": 1}


def test_a_failure_that_was_expected_is_none(monkeypatch: pytest.MonkeyPatch):
    FakeServe(refuse=lambda *_: 429).install(monkeypatch)
    assert CliRunner().invoke(probe, ["--quick"]).exit_code == 0


def test_a_server_that_does_not_start_is_an_error_with_its_last_words(fake: FakeServe):
    result = CliRunner().invoke(probe, ["--quick", "--broken"])
    assert result.exit_code == 1
    assert "exit code 2" in result.output
    assert "no such flag" in result.output
