"""Compiling the native kernel for this machine, once, into a folder of the user's.

Needs no JAX: whoever asks what would run here may not have it. The result is named after all that
it depends on, so a new compiler, jaxlib, processor or source makes a new library beside the old.
"""

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

__all__ = [
    "BF16_INSTRUCTIONS",
    "CODE_INSTRUCTIONS",
    "NATIVE_BLOCK_SIZES",
    "WRONG_ANSWER",
    "BuildError",
    "Recipe",
    "build_library",
    "make_recipe",
    "run_limited",
]

# Tokens of a KV block, as the source knows them.
NATIVE_BLOCK_SIZES = (8, 16, 32, 64, 128)

# What the source calls the instructions that its products of packed weights need.
BF16_INSTRUCTIONS = ("AMX", "AVX-512 bf16")
# The ones that read codes where there are some.
CODE_INSTRUCTIONS = "AVX-512 bf16"

SOURCE_DIR = Path(__file__).with_name("native_source")
# How far each is optimized. Those that take longest to compile come first: what they compute is
# written in vectors, and the rest of them is run once a step, so that little makes no difference.
MAIN_SOURCES: Mapping[str, str] = {
    "layer.cc": "-O1",
    "calls.cc": "-O1",
    "attention.cc": "-O2",
    "bf16_product.cc": "-O2",
    "sampling.cc": "-O2",
    "int8_product.cc": "-O2",
}

# In this order, after CXX.
COMPILERS = ("c++", "g++", "clang++")

# What a program dies of by its own fault, and not because the machine is full or somebody ended it.
OWN_FAULTS = (signal.SIGSEGV, signal.SIGILL, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT)

# What a self-test ends with that has got a wrong answer. Other ends of it, and of the compiler, may
# be for reasons that go away: no memory, no space on the disk.
WRONG_ANSWER = 86

# The rules of the products are in the source; no optimization may join what it keeps apart.
FLAGS = (
    *("-std=c++17", "-march=native", "-ffp-contract=off", "-fPIC"),
    *("-fvisibility=hidden", "-pthread", "-w"),
)
LINK_FLAGS = ("-shared", "-pthread")

COMPILE_TIMEOUT_S = 180.0
VERSION_TIMEOUT_S = 10.0


class BuildError(Exception):
    """There is no library, for a reason in one line.

    Attributes:
        lasting: trying again would end the same.
    """

    def __init__(self, reason: str, *, lasting: bool) -> None:
        super().__init__(reason)
        self.lasting = lasting


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a library is made.

    Attributes:
        compiler: with its own options.
        options: ours, for each source.
        library: where the result belongs, whether it is there or not.
    """

    compiler: tuple[str, ...]
    options: tuple[str, ...]
    library: Path


def make_recipe(folder: Path, *, defines: Sequence[str] = ()) -> Recipe:
    """Find the compiler, and the name of the library that it would make.

    Args:
        folder: where libraries lie.
        defines: macros that leave instructions out: HEADRACE_NO_AMX, HEADRACE_NO_BF16,
            HEADRACE_NO_VNNI.

    Raises:
        BuildError: there is no compiler, or no jaxlib to compile for.
    """
    compiler = tuple(_find_compiler())
    spec = find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("jaxlib is not installed", lasting=False)
    headers = Path(spec.submodule_search_locations[0]) / "include"
    options = (*FLAGS, *(f"-D{name}" for name in defines), "-isystem", str(headers))
    parts = [
        *(path.read_bytes() for path in sorted(SOURCE_DIR.iterdir()) if path.is_file()),
        "\0".join((*compiler, *FLAGS, *LINK_FLAGS, *defines, repr(MAIN_SOURCES))).encode(),
        run_limited([*compiler, "--version"], timeout_s=VERSION_TIMEOUT_S).encode(),
        version("jaxlib").encode(),
        _processor().encode(),
    ]
    key = hashlib.sha256()
    for part in parts:
        key.update(hashlib.sha256(part).digest())
    return Recipe(compiler, options, folder / f"native-{key.hexdigest()[:24]}.so")


def build_library(recipe: Recipe, *, timeout_s: float = COMPILE_TIMEOUT_S) -> None:
    """Compile the library unless it is there, all its sources at once.

    Others may do the same at the same time.

    Raises:
        BuildError: it cannot be compiled or kept.
    """
    library = recipe.library
    if library.exists():
        return
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        # The compiler's own files go there too: a container may have no other folder to write to.
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build-") as folder:
            made = Path(folder, library.name)
            objects = [str(Path(folder, name).with_suffix(".o")) for name in MAIN_SOURCES]
            run = partial(run_limited, timeout_s=timeout_s, TMPDIR=folder)
            compilations = [
                [
                    *(*recipe.compiler, *recipe.options, level),
                    *("-c", str(SOURCE_DIR / name), "-o", object_file),
                ]
                for (name, level), object_file in zip(MAIN_SOURCES.items(), objects, strict=True)
            ]
            with ThreadPoolExecutor() as pool:
                list(pool.map(run, compilations))
            run([*recipe.compiler, *LINK_FLAGS, *objects, "-o", str(made)])
            made.replace(library)
    except OSError as error:
        reason = f"cannot write to {library.parent}: {error.strerror}"
        raise BuildError(reason, lasting=False) from error


def run_limited(command: Sequence[str], *, timeout_s: float, **environment: str) -> str:
    """Run a program that may fail or hang, and return what it printed.

    Args:
        command: the program and its arguments.
        timeout_s: after which it is killed with all its children.
        environment: variables that it finds besides ours.

    Raises:
        BuildError: it could not be started, failed, or had to be killed with all its children.
    """
    name = Path(command[0]).name
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**os.environ, **environment},
        )
    except OSError as error:
        raise BuildError(f"{name} cannot be started: {error.strerror}", lasting=False) from error
    with process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise BuildError(f"{name} did not end within {timeout_s:g} s", lasting=False) from None
        finally:
            # Also whatever it has started, if it is still there.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode < 0:
        died = signal.Signals(-process.returncode)
        raise BuildError(f"{name} died of {died.name}", lasting=died in OWN_FAULTS)
    if process.returncode != 0:
        is_wrong = process.returncode == WRONG_ANSWER
        raise BuildError(f"{name} failed: {_telling_line(errors)}", lasting=is_wrong)
    return output


def _find_compiler() -> list[str]:
    """Return the command of a C++ compiler: CXX, or the first of the usual names."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    if wanted:
        if shutil.which(wanted[0]) is None:
            raise BuildError(
                f"there is no C++ compiler {wanted[0]!r}, as CXX has it", lasting=False
            )
        return wanted
    for name in COMPILERS:
        if (found := shutil.which(name)) is not None:
            return [found]
    raise BuildError(
        f"there is no C++ compiler: none of {', '.join(COMPILERS)} is installed", lasting=False
    )


def _processor() -> str:
    """What -march=native goes by: model and flags of the processor."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    first = text.partition("\n\n")[0].splitlines()
    kept = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in first if line.startswith(kept))


def _telling_line(errors: str) -> str:
    """Return the line that says what is wrong: the first error, else the last of all."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    telling = [line for line in lines if "error: " in line]
    return (telling or lines[-1:] or ["it says nothing"])[0][:300]
