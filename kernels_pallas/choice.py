"""Which attention kernel serves, and why. Needs no JAX.

A kernel that was compiled here is trusted after it has passed `self_test` in a process of its own;
the verdict lies beside the library, so that the next start pays nothing.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from kernels_pallas.gpu_choice import GPU_KERNELS, GpuUse, find_gpu_fault
from kernels_pallas.kernel_names import AttentionKernel, WantedKernel
from kernels_pallas.native_build import (
    BF16_INSTRUCTIONS,
    CODE_INSTRUCTIONS,
    NATIVE_BLOCK_SIZES,
    BuildError,
    Recipe,
    build_library,
    make_recipe,
    run_limited,
)

__all__ = [
    "KernelChoice",
    "KernelUnavailable",
    "choose_kernel",
    "default_block_size",
    "foresee_kernel",
    "kernels_dir",
]

# What "auto" tries before the reference, which runs everywhere.
FASTEST_FIRST: Mapping[str, tuple[AttentionKernel, ...]] = {
    "cpu": ("native",),
    "gpu": GPU_KERNELS,
}

SELF_TEST_TIMEOUT_S = 120.0


class KernelUnavailable(ValueError):
    """The kernel that was asked for does not work here, for a reason in one line."""


def default_block_size(platform: str) -> int:
    """Tokens of a KV block with which the kernels of a platform are quickest.

    The values of 32 tokens fill a tile register of AMX (decision 10).
    """
    return 32 if platform == "cpu" else 16


def kernels_dir(cache: Path) -> Path:
    """Where compiled kernels are kept in a cache of ours."""
    return cache / "kernels"


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A kernel that works.

    Attributes:
        reason: why it and not another, for people.
        library: what must be loaded before it runs; None if nothing.
        can_project: whether it also has products for packed weights (kernels_pallas.projection).
        reads_codes: whether these read codes where there are some (kernels_pallas.group_codes).
    """

    kernel: AttentionKernel
    reason: str
    library: Path | None = None
    can_project: bool = False
    reads_codes: bool = False


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What came of a library: the instructions that it uses, or why it is not used."""

    instructions: str | None = None
    fault: str | None = None


def choose_kernel(
    wanted: WantedKernel,
    *,
    platform: str,
    block_size: int,
    folder: Path,
    gpu: GpuUse | None = None,
) -> KernelChoice:
    """Return the kernel to use, compiled and tested.

    Args:
        wanted: "auto" takes the fastest that works, and the reference where no other does.
        platform: JAX's name of the backend: "cpu", "gpu", ...
        block_size: tokens of a KV block.
        folder: where compiled kernels are kept.
        gpu: the GPU, and what for, where the platform is one.

    Raises:
        KernelUnavailable: `wanted` names a kernel that does not work.
    """
    return _choose(wanted, platform, block_size, folder, gpu, may_compile=True)


def foresee_kernel(
    *, platform: str, block_size: int, folder: Path, gpu: GpuUse | None = None
) -> KernelChoice:
    """Return what "auto" would choose, as far as is known without compiling anything."""
    return _choose("auto", platform, block_size, folder, gpu, may_compile=False)


def _choose(
    wanted: WantedKernel,
    platform: str,
    block_size: int,
    folder: Path,
    gpu: GpuUse | None,
    *,
    may_compile: bool,
) -> KernelChoice:
    if wanted == "reference":
        return KernelChoice("reference", "as asked")
    reasons: list[str] = []
    for kernel in FASTEST_FIRST.get(platform, ()) if wanted == "auto" else (wanted,):
        try:
            if kernel not in FASTEST_FIRST.get(platform, ()):
                raise KernelUnavailable(f"it is not for {platform}")
            if kernel == "native":
                return _native(block_size, folder, may_compile=may_compile)
            if gpu is None:
                raise KernelUnavailable("nobody says which GPU it is")
            fault = find_gpu_fault(kernel, gpu, block_size=block_size, may_run=may_compile)
            if fault is not None:
                raise KernelUnavailable(fault)
            tested = "passed its self-test" if may_compile else "will be tested at the start"
            return KernelChoice(kernel, "; ".join([f"{tested} on {gpu.device}", *reasons]))
        except (KernelUnavailable, BuildError) as error:
            reasons.append(f"{kernel} does not work: {error}")
    if wanted != "auto":
        raise KernelUnavailable(f"attention_kernel {'; '.join(reasons)}")
    return KernelChoice("reference", "; ".join(reasons) or f"there is no other for {platform}")


def _native(block_size: int, folder: Path, *, may_compile: bool) -> KernelChoice:
    if block_size not in NATIVE_BLOCK_SIZES:
        sizes = ", ".join(map(str, NATIVE_BLOCK_SIZES))
        raise KernelUnavailable(f"it has block sizes of {sizes}, not {block_size}")
    recipe = make_recipe(folder)
    verdict = _read_verdict(recipe)
    if verdict is None:
        if not may_compile:
            return KernelChoice("native", "the first start compiles it")
        verdict = _make_verdict(recipe)
    if verdict.fault is not None:
        raise KernelUnavailable(verdict.fault)
    return KernelChoice(
        "native",
        f"compiled for this CPU, {verdict.instructions}",
        recipe.library,
        can_project=verdict.instructions in BF16_INSTRUCTIONS,
        reads_codes=verdict.instructions == CODE_INSTRUCTIONS,
    )


def _make_verdict(recipe: Recipe) -> _Verdict:
    """Compile and test the library.

    Raises:
        BuildError: for a reason that may have gone the next time.
    """
    try:
        build_library(recipe)
        command = [sys.executable, "-m", "kernels_pallas.self_test", str(recipe.library)]
        output = run_limited(command, timeout_s=SELF_TEST_TIMEOUT_S)
        verdict = _Verdict(instructions=output.strip().splitlines()[-1])
    except BuildError as error:
        if not error.lasting:
            raise
        verdict = _Verdict(fault=str(error))
    _write_verdict(recipe, verdict)
    return verdict


def _verdict_path(recipe: Recipe) -> Path:
    return recipe.library.with_suffix(".json")


def _read_verdict(recipe: Recipe) -> _Verdict | None:
    """Return what is known; None if nothing, or if the library has gone."""
    try:
        fields = json.loads(_verdict_path(recipe).read_text(encoding="utf-8"))
        verdict = _Verdict(**fields)
    except (OSError, ValueError, TypeError):
        return None
    if verdict.fault is None and not recipe.library.exists():
        return None
    return verdict


def _write_verdict(recipe: Recipe, verdict: _Verdict) -> None:
    """Keep the verdict; where that is impossible the next start tests again."""
    path = _verdict_path(recipe)
    try:
        # Closing removes what has not got its name by then.
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.stem}-", encoding="utf-8"
        ) as file:
            json.dump(asdict(verdict), file)
            file.flush()
            os.replace(file.name, path)
    except OSError:
        return
