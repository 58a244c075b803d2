"""Building, with compilers that are shell scripts: none, broken, hanging, two at once."""

import os
import shutil
import threading
from pathlib import Path

import pytest

from attention_kernels import ready_kernel
from kernels_pallas import native_build
from kernels_pallas.native_build import (
    NATIVE_BLOCK_SIZES,
    WRONG_ANSWER,
    BuildError,
    build_library,
    make_recipe,
    run_limited,
)

# Writes its arguments into what it makes, and what it was given of that. The output's name comes
# last.
COMPILES = """#!/bin/sh
if [ "$1" = --version ]; then echo "compiler 1.0"; exit; fi
for last; do :; done
echo "$@" > "$last"
for made; do case "$made" in "$last");; *.o) cat "$made" >> "$last";; esac; done
echo "$TMPDIR" > "$(dirname "$0")/temporary"
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Install a compiler of the given text, and return its path."""

    def install(text=COMPILES, name="compiler"):
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    return install


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.exists() else []


def test_a_library_is_compiled_from_our_source_for_this_machine(compiler, tmp_path):
    path = compiler()
    recipe = make_recipe(tmp_path / "new" / "kernels")
    assert not recipe.library.exists()
    build_library(recipe)
    link, *compilations = [line.split() for line in recipe.library.read_text().splitlines()]
    assert recipe.compiler == (str(path),)
    assert "-shared" in link
    sources = [Path(word).name for line in compilations for word in line if word.endswith(".cc")]
    assert sorted(sources) == [path.name for path in sorted(native_build.SOURCE_DIR.glob("*.cc"))]
    temporary = (tmp_path / "temporary").read_text().strip()
    for command in compilations:
        assert {"-march=native", "-ffp-contract=off", "-c"} <= set(command)
        assert (Path(command[command.index("-isystem") + 1]) / "xla/ffi/api/ffi.h").is_file()
        assert command[-1] in link
        assert Path(command[-1]).parent == Path(temporary)
    # The compiler wrote there and nowhere else, and nothing of it is left.
    assert Path(temporary).parent == recipe.library.parent
    assert link[-1] == f"{temporary}/{recipe.library.name}"
    assert leftovers(recipe.library.parent) == [recipe.library.name]


def test_what_is_there_is_not_compiled_again(compiler, tmp_path):
    compiler()
    recipe = make_recipe(tmp_path)
    recipe.library.write_text("as it was")
    build_library(recipe)
    assert recipe.library.read_text() == "as it was"


def test_the_name_changes_with_all_that_the_library_depends_on(compiler, tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    (source / "attention.cc").write_text("one")
    monkeypatch.setattr(native_build, "SOURCE_DIR", source)
    compiler()
    names = [make_recipe(tmp_path).library.name]
    assert make_recipe(tmp_path).library.name == names[0]
    names.append(make_recipe(tmp_path, defines=["HEADRACE_NO_AMX"]).library.name)
    (source / "attention.cc").write_text("two")
    names.append(make_recipe(tmp_path).library.name)
    (source / "another.h").write_text("")
    names.append(make_recipe(tmp_path).library.name)
    compiler(COMPILES.replace("1.0", "2.0"))
    names.append(make_recipe(tmp_path).library.name)
    monkeypatch.setattr(native_build, "version", lambda package: "9.9")
    names.append(make_recipe(tmp_path).library.name)
    monkeypatch.setattr(native_build, "_processor", lambda: "another")
    names.append(make_recipe(tmp_path).library.name)
    assert len(set(names)) == 7


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"PATH": "", "CXX": ""},
            r"no C\+\+ compiler: none of c\+\+, g\+\+, clang\+\+ is installed",
        ),
        ({"CXX": "no-such-compiler -m64"}, r"no C\+\+ compiler 'no-such-compiler', as CXX has it"),
    ],
)
def test_without_a_compiler_the_reason_says_so(setting, message, tmp_path, monkeypatch):
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BuildError, match=message) as caught:
        make_recipe(tmp_path)
    assert not caught.value.lasting


def test_without_jaxlib_there_is_nothing_to_compile_for(compiler, tmp_path, monkeypatch):
    compiler()
    monkeypatch.setattr(native_build, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match="jaxlib is not installed"):
        make_recipe(tmp_path)


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(compiler, tmp_path):
    compiler(
        COMPILES.replace(
            'echo "$@" > "$last"\n',
            "echo 'a.h: note: x' >&2; echo 'a.cc:1: error: no' >&2; exit 1\n",
        )
    )
    recipe = make_recipe(tmp_path / "kernels")
    with pytest.raises(BuildError, match=r"compiler failed: a\.cc:1: error: no$") as caught:
        build_library(recipe)
    assert not caught.value.lasting  # it may have been killed, or the disk may be full
    assert leftovers(tmp_path / "kernels") == []


def test_a_compiler_that_hangs_is_ended_with_its_children(compiler, tmp_path):
    """The child holds the pipe open: only its death lets the pipe, and this test, end."""
    compiler(COMPILES.replace('echo "$@" > "$last"', "sleep 1000 & sleep 1000"))
    recipe = make_recipe(tmp_path / "kernels")
    with pytest.raises(BuildError, match=r"compiler did not end within 0\.2 s") as caught:
        build_library(recipe, timeout_s=0.2)
    assert not caught.value.lasting
    assert leftovers(tmp_path / "kernels") == []


def test_a_folder_that_cannot_be_written_is_named(compiler, tmp_path):
    compiler()
    (tmp_path / "file").write_text("")
    recipe = make_recipe(tmp_path / "file" / "kernels")
    with pytest.raises(BuildError, match=r"cannot write to .*kernels: Not a directory"):
        build_library(recipe)


def test_two_builds_at_once_do_not_meet(compiler, tmp_path):
    """Each compiler waits until both have begun; the library is whole whoever ends last."""
    os.mkfifo(tmp_path / "gate")
    gated = 'case "$*" in *-shared*) echo started > GATE;; esac; echo "$@"'
    compiler(COMPILES.replace('echo "$@"', gated.replace("GATE", str(tmp_path / "gate"))))
    recipe = make_recipe(tmp_path / "kernels")
    errors = []

    def build():
        try:
            build_library(recipe)
        except BuildError as error:
            errors.append(error)

    builders = [threading.Thread(target=build) for _ in range(2)]
    for builder in builders:
        builder.start()
    with (tmp_path / "gate").open() as gate:
        started = 0
        while started < 2:
            started += gate.readline() == "started\n"
    for builder in builders:
        builder.join()
    assert errors == []
    assert recipe.library.read_text().startswith("-shared")
    assert leftovers(recipe.library.parent) == [recipe.library.name]


@pytest.mark.parametrize(("name", "lasting"), [("SEGV", True), ("KILL", False), ("TERM", False)])
def test_a_program_that_dies_is_told_by_its_signal(name, lasting):
    with pytest.raises(BuildError, match=f"sh died of SIG{name}") as caught:
        run_limited(["sh", "-c", f"kill -{name} $$"], timeout_s=60)
    assert caught.value.lasting == lasting


@pytest.mark.parametrize(("code", "lasting"), [(1, False), (4, False), (WRONG_ANSWER, True)])
def test_only_a_wrong_answer_would_be_the_same_again(code, lasting):
    with pytest.raises(BuildError, match="sh failed: no") as caught:
        run_limited(["sh", "-c", f"echo no >&2; exit {code}"], timeout_s=60)
    assert caught.value.lasting == lasting


def test_a_program_that_is_not_there_cannot_be_started():
    with pytest.raises(BuildError, match="no-such cannot be started: No such file"):
        run_limited(["no-such"], timeout_s=60)


def test_the_block_sizes_are_those_of_the_source():
    source = (native_build.SOURCE_DIR / "attention_worker.h").read_text()
    assert f"constexpr int KV_TILE = {max(NATIVE_BLOCK_SIZES)};" in source
    assert f"constexpr int MIN_BLOCK_SIZE = {min(NATIVE_BLOCK_SIZES)};" in source


def test_where_there_is_a_compiler_the_library_serves():
    """Tests of the library are skipped where it does not serve: that must have no other reason."""
    if not any(map(shutil.which, native_build.COMPILERS)):
        pytest.skip("no compiler here")
    assert ready_kernel("native") == "native"  # or the reason is raised
