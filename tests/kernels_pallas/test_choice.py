"""The choice of a kernel, with self-tests that are played by small programs."""

import json
import sys
from functools import partial
from pathlib import Path
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV, SIGTERM

import pytest

from kernels_pallas import choice
from kernels_pallas.choice import KernelUnavailable, choose_kernel, foresee_kernel
from kernels_pallas.gpu_choice import GpuUse
from kernels_pallas.native_build import WRONG_ANSWER, BuildError, Recipe, run_limited


@pytest.fixture
def native(tmp_path, monkeypatch):
    """Let a line of Python stand for the self-test; returns what was asked to build or test."""
    asked = []

    def play(script, *, builds=None):
        def build(recipe):
            asked.append("build")
            if builds is not None:
                raise builds
            recipe.library.write_text("library")

        def test(command, *, timeout_s):
            asked.append("test")
            assert command[1:] == ["-m", "kernels_pallas.self_test", str(recipe.library)]
            return run_limited([sys.executable, "-c", script], timeout_s=min(timeout_s, LIMIT_S))

        recipe = Recipe(("c++",), (), tmp_path / "attention-1.so")
        monkeypatch.setattr(choice, "make_recipe", lambda folder: recipe)
        monkeypatch.setattr(choice, "build_library", build)
        monkeypatch.setattr(choice, "run_limited", test)
        asked.clear()
        return asked

    return play


LIMIT_S = 60.0

WRONG = f"import sys; print('error: int8: wrong by 3', file=sys.stderr); sys.exit({WRONG_ANSWER})"


def choose(wanted="auto", *, platform="cpu", block_size=16):
    chosen = choose_kernel(wanted, platform=platform, block_size=block_size, folder=Path("unused"))
    return chosen.kernel, chosen.reason


def test_what_passes_its_test_serves_and_is_not_tested_again(native, tmp_path):
    asked = native("print('loading'); print('AMX')")
    for _ in range(2):
        chosen = choose_kernel("auto", platform="cpu", block_size=16, folder=tmp_path)
        assert (chosen.kernel, chosen.reason) == ("native", "compiled for this CPU, AMX")
        assert chosen.library == tmp_path / "attention-1.so"
    assert asked == ["build", "test"]


def test_a_library_that_has_gone_is_built_again(native, tmp_path):
    asked = native("print('AVX2')")
    choose()
    (tmp_path / "attention-1.so").unlink()
    assert choose() == ("native", "compiled for this CPU, AVX2")
    assert asked == ["build", "test"] * 2


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (WRONG, "failed: error: int8: wrong by 3"),
        *(
            (f"import os; os.kill(os.getpid(), {number.value})", f"died of {number.name}")
            for number in (SIGSEGV, SIGILL, SIGBUS, SIGFPE, SIGABRT)
        ),
    ],
)
def test_what_fails_its_test_does_not_serve_now_or_later(native, script, reason):
    asked = native(script)
    for _ in range(2):
        kernel, why = choose()
        assert kernel == "reference"
        assert why.startswith("native does not work: python")
        assert reason in why
        with pytest.raises(
            KernelUnavailable, match="attention_kernel native does not work: python"
        ):
            choose("native")
    assert asked == ["build", "test"]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (f"import os; os.kill(os.getpid(), {SIGKILL.value})", "died of SIGKILL"),
        (f"import os; os.kill(os.getpid(), {SIGTERM.value})", "died of SIGTERM"),
        ("raise MemoryError('no memory')", "failed: MemoryError: no memory"),
        ("raise ImportError('no symbol')", "failed: ImportError: no symbol"),
    ],
)
def test_what_ends_for_a_reason_that_may_go_is_tried_again(native, tmp_path, script, reason):
    asked = native(script)
    for _ in range(2):
        kernel, why = choose()
        assert kernel == "reference"
        assert reason in why
    assert asked == ["build", "test"] * 2
    assert not (tmp_path / "attention-1.json").exists()


def test_what_hangs_does_not_serve_but_may_be_tried_again(native, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "LIMIT_S", 0.2)
    asked = native("import signal; signal.pause()")
    for _ in range(2):
        kernel, why = choose()
        assert kernel == "reference"
        assert "did not end within 0.2 s" in why
    assert asked == ["build", "test"] * 2


@pytest.mark.parametrize(("lasting", "builds"), [(True, 1), (False, 2)])
def test_a_build_that_would_fail_again_is_not_repeated(native, lasting, builds):
    asked = native("", builds=BuildError("c++ failed: no", lasting=lasting))
    for _ in range(2):
        assert choose() == ("reference", "native does not work: c++ failed: no")
    assert asked == ["build"] * builds


def test_a_verdict_that_cannot_be_read_is_made_again(native, tmp_path):
    asked = native("print('AMX')")
    for text in ("", "[]", json.dumps({"other": 1})):
        (tmp_path / "attention-1.json").write_text(text)
        assert choose()[0] == "native"
    assert asked == ["build", "test"] * 3


def test_a_folder_that_keeps_no_verdict_costs_a_test_each_time(native, monkeypatch):
    asked = native("print('AMX')")

    def refuse(*args, **kwargs):
        raise OSError("read-only")

    monkeypatch.setattr(choice.tempfile, "NamedTemporaryFile", refuse)
    assert choose()[0] == choose()[0] == "native"
    assert asked == ["build", "test"] * 2


def test_a_verdict_that_cannot_be_kept_leaves_nothing(native, tmp_path, monkeypatch):
    asked = native("print('AMX')")

    def refuse(*args):
        raise OSError("the disk is full")

    monkeypatch.setattr(choice.os, "replace", refuse)
    assert choose()[0] == "native"
    assert asked == ["build", "test"]
    assert [path.name for path in tmp_path.iterdir()] == ["attention-1.so"]


def test_the_reference_needs_nothing(native):
    asked = native("")
    assert choose("reference") == ("reference", "as asked")
    assert asked == []


def test_a_kernel_for_cpus_is_for_nothing_else(native):
    asked = native("")
    assert choose(platform="tpu") == ("reference", "there is no other for tpu")
    with pytest.raises(KernelUnavailable, match="native does not work: it is not for gpu"):
        choose("native", platform="gpu")
    assert asked == []


def test_a_block_size_that_it_does_not_have_is_told(native):
    native("print('AMX')")
    reason = "native does not work: it has block sizes of 8, 16, 32, 64, 128, not 4"
    assert choose(block_size=4) == ("reference", reason)


def test_no_compiler_is_a_reason_and_no_error(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert choose() == (
        "reference",
        "native does not work: there is no C++ compiler 'no-such-compiler', as CXX has it",
    )
    seen = foresee_kernel(platform="cpu", block_size=16, folder=tmp_path)
    assert seen.kernel == "reference"


def test_foreseeing_compiles_nothing(native, tmp_path):
    def foresee():
        seen = foresee_kernel(platform="cpu", block_size=16, folder=tmp_path)
        return seen.kernel, seen.reason

    asked = native("print('AMX')")
    assert foresee() == ("native", "the first start compiles it")
    assert asked == []
    choose()
    assert foresee() == ("native", "compiled for this CPU, AMX")
    native(WRONG)
    (tmp_path / "attention-1.json").unlink()
    choose()
    assert foresee()[0] == "reference"


H200, A100 = GpuUse(device="NVIDIA H200"), GpuUse(device="NVIDIA A100-SXM4-80GB")


def choose_on(gpu, wanted="auto", *, faults=(), monkeypatch):
    """Choose on a GPU on which the named kernels fail their tests."""

    def run(command, *, timeout_s):
        if command[3] in faults:
            raise BuildError("python did not end within 120 s", lasting=False)
        return ""

    monkeypatch.setattr("kernels_pallas.gpu_choice.run_limited", run)
    chosen = choose_kernel(wanted, platform="gpu", block_size=16, folder=Path("unused"), gpu=gpu)
    return chosen.kernel, chosen.reason


def test_a_gpu_gets_the_first_kernel_that_passes_its_test(monkeypatch):
    choose_here = partial(choose_on, monkeypatch=monkeypatch)
    assert choose_here(H200) == ("mosaic_gpu", "passed its self-test on NVIDIA H200")
    hangs = "mosaic_gpu does not work: python did not end within 120 s"
    assert choose_here(H200, faults=["mosaic_gpu"]) == (
        "triton",
        f"passed its self-test on NVIDIA H200; {hangs}",
    )
    kernel, reason = choose_here(H200, faults=["mosaic_gpu", "triton"])
    assert kernel == "reference"
    assert reason == f"{hangs}; {hangs.replace('mosaic_gpu', 'triton')}"
    assert choose_here(A100)[0] == "triton"
    assert choose_here(H200, "triton")[0] == "triton"
    with pytest.raises(KernelUnavailable, match="mosaic_gpu does not work: it is for Hopper"):
        choose_here(A100, "mosaic_gpu")


def test_what_a_gpu_would_get_is_foreseen_without_running_anything(tmp_path):
    foresee = partial(foresee_kernel, platform="gpu", block_size=16, folder=tmp_path)
    seen = foresee(gpu=H200)
    assert (seen.kernel, seen.reason) == (
        "mosaic_gpu",
        "will be tested at the start on NVIDIA H200",
    )
    assert foresee(gpu=None).kernel == "reference"
