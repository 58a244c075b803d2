from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner

from bench import startup as startup_module
from bench.server_process import ServerFailed, ServerProcess
from bench.startup import measure_startup, startup


def test_each_cold_start_has_an_empty_folder_and_the_warm_one_after_it_the_same():
    folders: list[tuple[Path, bool]] = []

    def start_once(folder: Path) -> ServerProcess:
        folders.append((folder, any(folder.iterdir())))
        (folder / "program").touch()
        return ServerProcess("http://x", 1.0 * len(folders), 2.0 * len(folders), 1)

    times = measure_startup(start_once, repeats=2)
    assert [was_filled for _, was_filled in folders] == [False, True, False, True]
    assert folders[0][0] == folders[1][0] != folders[2][0]
    assert times["cold"].ready_s == [2.0, 6.0]
    assert times["warm"].listening_s == [2.0, 4.0]


def test_the_medians_are_printed_and_all_times_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    commands: list[Sequence[str]] = []
    folders: list[str] = []
    ready_s = iter([9.0, 2.0, 8.0, 1.0, 10.0, 3.0])

    @contextmanager
    def running(
        command: Sequence[str], *, environment: dict[str, str], **_: object
    ) -> Iterator[ServerProcess]:
        commands.append(command)
        folders.append(environment["JAX_COMPILATION_CACHE_DIR"])
        assert environment["PYTHONDONTWRITEBYTECODE"] == ""
        yield ServerProcess("http://x", 0.5, next(ready_s), 1)

    monkeypatch.setattr(startup_module, "running_server", running)
    monkeypatch.setattr(startup_module, "find_headrace", lambda: "headrace")
    path = tmp_path / "startup.json"
    result = CliRunner().invoke(
        startup, ["--repeats", "3", "--output-json", str(path), "tiny", "--max-num-seqs", "4"]
    )
    assert result.exit_code == 0, result.output
    assert commands == [["headrace", "serve", "tiny", "--max-num-seqs", "4"]] * 6
    assert len(set(folders)) == 3
    assert "9.00" in result.stdout
    assert "2.00" in result.stdout
    document = orjson.loads(path.read_bytes())
    assert document["starts"]["cold"]["ready_s"] == [9.0, 8.0, 10.0]
    assert document["serve_arguments"] == ["tiny", "--max-num-seqs", "4"]


def test_a_server_that_does_not_start_is_an_error_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch,
):
    @contextmanager
    def running(command: Sequence[str], *, output: object, **_: object) -> Iterator[ServerProcess]:
        print("no such model", file=output)
        raise ServerFailed("the server ended before it was ready, with exit code 1")
        yield

    monkeypatch.setattr(startup_module, "running_server", running)
    monkeypatch.setattr(startup_module, "find_headrace", lambda: "headrace")
    result = CliRunner().invoke(startup, [])
    assert result.exit_code == 1
    assert "no such model" in result.output
    assert "exit code 1" in result.output
