"""Compiled programs on disk: the same program again, or none; never a wrong one, never an error."""

import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compile_cache import without_compile_cache
from jaxengine import program_store
from jaxengine.program_store import ProgramStore

X = jax.ShapeDtypeStruct((4,), jnp.float32)


@pytest.fixture(autouse=True)
def really_compile():
    with without_compile_cache():
        yield


def compiled(factor=3.0):
    return jax.jit(lambda x: x * factor, donate_argnums=0).lower(X).compile()


def run(program):
    return np.asarray(program(jnp.arange(4.0))).tolist()


def test_a_program_that_was_kept_does_the_same(tmp_path):
    ProgramStore(tmp_path / "new", facts=["a"]).save("one", compiled())
    program = ProgramStore(tmp_path / "new", facts=["a"]).load("one")
    assert run(program) == [0.0, 3.0, 6.0, 9.0]


def test_it_still_takes_over_its_donated_argument(tmp_path):
    store = ProgramStore(tmp_path, facts=[])
    store.save("one", compiled())
    x = jnp.arange(4.0)
    store.load("one")(x)
    assert x.is_deleted()


def test_other_things_are_kept_on_the_same_conditions(tmp_path, caplog):
    store = ProgramStore(tmp_path, facts=["a"])
    store.save_bytes("times", b"1 2 3")
    assert ProgramStore(tmp_path, facts=["a"]).load_bytes("times") == b"1 2 3"
    assert ProgramStore(tmp_path, facts=["b"]).load_bytes("times") is None
    assert store.load_bytes("other") is None
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes() + b"4")
    assert store.load_bytes("times") is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_another_program_or_other_facts_have_none(tmp_path):
    ProgramStore(tmp_path, facts=["a", "b"]).save("one", compiled())
    assert ProgramStore(tmp_path, facts=["a", "b"]).load("two") is None
    for facts in (["a", "c"], ["ab"], ["a", "b", ""], []):
        assert ProgramStore(tmp_path, facts=facts).load("one") is None


@pytest.mark.parametrize(
    "change",
    [
        "XLA_FLAGS",
        "the source",
        "a library",
        "a setting of JAX",
        "the processor",
        "the number of processors",
        "the driver",
    ],
)
def test_whatever_a_program_depends_on_makes_it_another(change, tmp_path, monkeypatch):
    ProgramStore(tmp_path, facts=[]).save("one", compiled())
    assert ProgramStore(tmp_path, facts=[]).load("one") is not None
    match change:
        case "XLA_FLAGS":
            monkeypatch.setenv("XLA_FLAGS", "--xla_something")
        case "the source":
            monkeypatch.setattr(program_store, "SOURCE", "another")
        case "a library":
            monkeypatch.setattr(program_store, "version", lambda name: "0")
        case "a setting of JAX":
            with jax.numpy_dtype_promotion("strict"):
                assert ProgramStore(tmp_path, facts=[]).load("one") is None
            return
        case "the processor":
            monkeypatch.setattr(program_store.platform, "machine", lambda: "abacus")
        case "the number of processors":
            monkeypatch.setattr(program_store.os, "sched_getaffinity", lambda _: set(range(999)))
        case "the driver":
            [device, *_] = jax.devices()
            other = SimpleNamespace(
                platform=device.platform,
                device_kind=device.device_kind,
                client=SimpleNamespace(platform_version="another"),
            )
            monkeypatch.setattr(program_store.jax, "devices", lambda: [other])
    assert ProgramStore(tmp_path, facts=[]).load("one") is None


def test_a_source_is_its_text_and_its_name(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    names = [program_store.hash_source([package])]
    for name, text in (("step.py", "1"), ("step.py", "2"), ("step.cc", "2"), ("step.h", "")):
        (package / name).write_text(text)
        names.append(program_store.hash_source([package]))
    assert len(set(names)) == 5
    (package / "notes.txt").write_text("no source")
    assert program_store.hash_source([package]) == names[-1]


def test_of_several_devices_a_program_runs_on_the_first(tmp_path):
    """In a process of its own: how many devices there are is decided once."""
    script = f"""
import jax, jax.numpy as jnp
from pathlib import Path
from jaxengine.program_store import ProgramStore
assert len(jax.devices()) == 2
store = ProgramStore(Path({str(tmp_path)!r}), facts=[])
store.save("one", jax.jit(lambda x: x * 3).lower(jnp.arange(4.0)).compile())
print(store.load("one")(jnp.arange(4.0)).tolist())
"""
    found = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "[0.0, 3.0, 6.0, 9.0]\n", found.stderr


@pytest.mark.parametrize("damage", ["cut short", "a bit", "empty"])
def test_what_is_damaged_is_not_loaded(damage, tmp_path, caplog):
    store = ProgramStore(tmp_path, facts=[])
    store.save("one", compiled())
    [path] = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    match damage:
        case "cut short":
            del content[-100:]
        case "a bit":
            content[len(content) // 2] ^= 1
        case "empty":
            content.clear()
    path.write_bytes(content)
    assert store.load("one") is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_it_does_not_go_with_the_cache_of_jax(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    with pytest.raises(ValueError, match="jax_compilation_cache_dir"):
        ProgramStore(tmp_path, facts=[])


def test_what_cannot_be_kept_costs_a_warning(tmp_path, caplog):
    ProgramStore(tmp_path, facts=[]).save("one", "no program")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_half_way_leaves_nothing(tmp_path, caplog, monkeypatch):
    def refuse(*args):
        raise OSError("the disk is full")

    monkeypatch.setattr(program_store.os, "replace", refuse)
    ProgramStore(tmp_path, facts=[]).save("one", compiled())
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    ProgramStore(tmp_path / "file" / "folder", facts=[]).save("one", compiled())
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_what_was_not_used_for_longest_goes(tmp_path, monkeypatch):
    store = ProgramStore(tmp_path, facts=[])
    for age, name in enumerate(["new", "old", "older"]):
        store.save(name, compiled())
        path = max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.utime(path, (1e9 - age, 1e9 - age))
        size = path.stat().st_size
    assert store.load("older") is not None  # used now
    monkeypatch.setattr(program_store, "MOST_BYTES", 3 * size + size // 2)
    store.save("newest", compiled())
    kept = [name for name in ("newest", "new", "old", "older") if store.load(name) is not None]
    assert kept == ["newest", "new", "older"]
