from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from bench import local
from bench.server_process import ServerFailed, ServerProcess


def test_arguments_after_two_dashes_are_for_the_server():
    assert local.split_arguments(["--seed", "1", "--", "tiny"]) == (["--seed", "1"], ["tiny"])
    assert local.split_arguments(["--seed", "1"]) == (["--seed", "1"], [])
    assert local.split_arguments([]) == ([], [])


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    seen: list[Sequence[str]] = []

    @contextmanager
    def running(command: Sequence[str], **_: object) -> Iterator[ServerProcess]:
        seen.append(command)
        if "broken" in command:
            raise ServerFailed("it ended")
        yield ServerProcess("http://127.0.0.1:9", 0.1, 0.2, 1)

    monkeypatch.setattr(local, "running_server", running)
    monkeypatch.setattr(local, "find_headrace", lambda: "headrace")
    return seen


def test_the_measurement_runs_against_the_server_and_its_failure_is_ours(
    commands: list[Sequence[str]], capsys: pytest.CaptureFixture[str]
):
    # Nobody listens on port 9, so the measurement fails after the server "started".
    assert local.main(["--seed", "1", "--", "tiny"]) == 1
    assert commands == [["headrace", "serve", "tiny"]]
    assert "http://127.0.0.1:9: no connection" in capsys.readouterr().err


def test_a_server_that_does_not_start_is_one_line(
    commands: list[Sequence[str]], capsys: pytest.CaptureFixture[str]
):
    assert local.main(["--", "broken"]) == 1
    assert capsys.readouterr().err == "Error: it ended\n"
