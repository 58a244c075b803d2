"""Compiled steps between runs: a warm start loads them, without tracing anything again.

JAX's own compilation cache is keyed by what tracing gives, so every start has to trace all
programs first: half a second each, while the interpreter can do nothing else. Here a program lies
under a key of all that its trace depends on: the packages' source, the versions of what they are
built on, the machine, and the shapes at hand. The two do not go together: on the CPU a program
that JAX has loaded from its cache cannot be serialized again (it comes back without its functions).

Programs are pickled, as JAX does it. The folder must belong to the user alone, like every cache of
code; what is damaged is compiled anew.
"""

import contextlib
import hashlib
import logging
import os
import pickle
import platform
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import jax
from jax.experimental import serialize_executable

from jaxengine.host_threads import num_processors

__all__ = ["ProgramStore"]

logger = logging.getLogger(__name__)

PACKAGES = (Path(__file__).parent, Path(__file__).parent.parent / "kernels_pallas")
SOURCE_SUFFIXES = (".py", ".cc", ".h")
LIBRARIES = ("jax", "jaxlib", "flax", "numpy")
DIGEST_BYTES = hashlib.sha256().digest_size

# Beyond this, what was not used for longest goes.
MOST_BYTES = 1 << 29


class ProgramStore:
    """A folder of compiled programs.

    Args:
        folder: made when there is something to keep.
        facts: what all of them depend on besides the source, the libraries and the machine.
        devices: that they run on; None is JAX's first.

    Raises:
        ValueError: JAX's own compilation cache is on.
    """

    def __init__(
        self,
        folder: Path,
        *,
        facts: Iterable[str],
        devices: Sequence[jax.Device] | None = None,
    ) -> None:
        if jax.config.jax_compilation_cache_dir is not None:
            raise ValueError("programs cannot be kept while jax_compilation_cache_dir is set")
        self._folder = folder
        self._devices = list(devices or jax.devices()[:1])
        key = hashlib.sha256()
        for fact in (*_surroundings(), *facts):
            key.update(hashlib.sha256(fact.encode()).digest())
        self._key = key.digest()

    def load(self, fact: str) -> jax.stages.Compiled | None:
        """Return a program that was kept; None if there is none, or none that can be loaded.

        Args:
            fact: what sets this program apart from the others.
        """
        pickled = self.load_bytes(fact)
        if pickled is None:
            return None
        try:
            executable, in_tree, out_tree = pickle.loads(pickled)
            program: jax.stages.Compiled = serialize_executable.deserialize_and_load(
                executable, in_tree, out_tree, execution_devices=self._devices
            )
        except Exception as error:  # JAX and pickle raise whatever they like
            logger.warning("compiling anew: %s cannot be loaded: %s", self._path(fact), error)
            return None
        return program

    def save(self, fact: str, program: jax.stages.Compiled) -> None:
        """Keep a program; where that is impossible, the next start compiles again."""
        try:
            pickled = pickle.dumps(serialize_executable.serialize(program))
        except Exception as error:  # not every backend can serialize
            logger.warning("programs cannot be kept for the next start: %s", error)
            return
        self.save_bytes(fact, pickled)

    def load_bytes(self, fact: str) -> bytes | None:
        """Return something else that was kept under a fact of its own; None if it is not there."""
        path = self._path(fact)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        digest, kept = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        if hashlib.sha256(kept).digest() != digest:
            logger.warning("%s is damaged and will be made anew", path)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return kept

    def save_bytes(self, fact: str, kept: bytes) -> None:
        """Keep what is not a program but goes with them, on the same conditions."""
        path = self._path(fact)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Closing removes what has not got its name by then.
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".") as file:
                file.write(hashlib.sha256(kept).digest() + kept)
                file.flush()
                os.replace(file.name, path)
            self._make_room()
        except OSError as error:
            logger.warning("%s cannot be kept for the next start: %s", path, error)

    def _path(self, fact: str) -> Path:
        digest = hashlib.sha256(self._key + fact.encode()).hexdigest()
        return self._folder / f"{digest[:32]}.program"

    def _make_room(self) -> None:
        """Remove what was not used for longest."""
        used = []
        for path in self._folder.glob("*.program"):
            with contextlib.suppress(FileNotFoundError):  # another start may do the same
                used.append((path.stat().st_mtime, path.stat().st_size, path))
        total = sum(size for _, size, _ in used)
        for _, size, path in sorted(used):
            if total <= MOST_BYTES:
                return
            path.unlink(missing_ok=True)
            total -= size


def hash_source(packages: Iterable[Path]) -> str:
    """Return a name of all source of some packages."""
    key = hashlib.sha256()
    for package in packages:
        for path in sorted(package.rglob("*")):
            if path.suffix in SOURCE_SUFFIXES:
                name = path.relative_to(package.parent).as_posix()
                for part in (name.encode(), path.read_bytes()):
                    key.update(hashlib.sha256(part).digest())
    return key.hexdigest()


# As it is when the modules are loaded: a program is made by these, whatever replaces them later.
SOURCE = hash_source(PACKAGES)


def _surroundings() -> Iterator[str]:
    """What every program depends on."""
    yield SOURCE
    yield from (f"{name} {version(name)}" for name in LIBRARIES)
    # XLA divides work among so many processors when it compiles.
    yield f"{platform.python_version()} {platform.machine()} {num_processors()}"
    yield from (f"{device.platform} {device.device_kind}" for device in jax.devices())
    yield jax.devices()[0].client.platform_version  # of the driver, on a GPU
    yield os.environ.get("XLA_FLAGS", "")
    # Where caches lie changes no program.
    yield repr(sorted(item for item in jax.config.values.items() if "cache" not in item[0]))
    with contextlib.suppress(OSError):
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        first = cpuinfo.partition("\n\n")[0].splitlines()
        yield "\n".join(line for line in first if line.startswith(("model", "flags", "Features")))
