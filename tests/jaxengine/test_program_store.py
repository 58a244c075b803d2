"""Compiled programs on disk: the same program again, or none; never a wrong one, never an error."""

import logging
import os

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


def test_another_program_or_other_facts_have_none(tmp_path):
    ProgramStore(tmp_path, facts=["a", "b"]).save("one", compiled())
    assert ProgramStore(tmp_path, facts=["a", "b"]).load("two") is None
    for facts in (["a", "c"], ["ab"], ["a", "b", ""], []):
        assert ProgramStore(tmp_path, facts=facts).load("one") is None


@pytest.mark.parametrize(
    "change", ["XLA_FLAGS", "a source", "a library", "a setting of JAX", "the processor"]
)
def test_whatever_a_program_depends_on_makes_it_another(change, tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "step.py").write_text("1")
    monkeypatch.setattr(program_store, "PACKAGES", (package,))
    ProgramStore(tmp_path, facts=[]).save("one", compiled())
    assert ProgramStore(tmp_path, facts=[]).load("one") is not None
    match change:
        case "XLA_FLAGS":
            monkeypatch.setenv("XLA_FLAGS", "--xla_something")
        case "a source":
            (package / "step.py").write_text("2")
        case "a library":
            monkeypatch.setattr(program_store, "version", lambda name: "0")
        case "a setting of JAX":
            with jax.numpy_dtype_promotion("strict"):
                assert ProgramStore(tmp_path, facts=[]).load("one") is None
            return
        case "the processor":
            monkeypatch.setattr(program_store.platform, "machine", lambda: "abacus")
    assert ProgramStore(tmp_path, facts=[]).load("one") is None


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
