import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from golden_model import TINY_DIR, default_model_files
from jaxengine.errors import ModelError
from jaxengine.weights.source import (
    DEFAULT_ALIAS,
    ModelFiles,
    cache_dir,
    find_model,
    list_aliases,
    resolve_model,
)

# The hub's client reads its settings when it is imported, so each case needs its own process.
ASK = """
import json, sys
from jaxengine.errors import ModelError
from jaxengine.weights.source import find_model, resolve_model
try:
    answer = str(resolve_model(sys.argv[1]).path)
except ModelError as error:
    answer = f"ModelError: {error}"
found = find_model(sys.argv[1])
print(json.dumps([answer, found and str(found.path)]))
"""


def ask_hub(repo_id, **environment):
    """What resolve_model and find_model say in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", ASK, repo_id],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def hub_snapshot(hf_home: Path, owner: str, name: str) -> Path:
    """Lay a tiny model out as the hub's client does."""
    repository = hf_home / "hub" / f"models--{owner}--{name}"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (snapshot / file).symlink_to(TINY_DIR / "llama" / file)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    return snapshot


def test_a_directory_is_a_model():
    directory = TINY_DIR / "llama"
    expected = ModelFiles("llama", directory, "safetensors")
    assert resolve_model(str(directory)) == expected
    assert find_model(str(directory)) == expected


def test_a_gguf_file_is_a_model():
    path = TINY_DIR / "llama" / "tiny-llama.gguf"
    assert resolve_model(str(path)) == ModelFiles("tiny-llama", path, "gguf")


def test_a_tilde_means_home(monkeypatch):
    monkeypatch.setenv("HOME", str(TINY_DIR))
    assert resolve_model("~/llama").path == TINY_DIR / "llama"


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "lacks config.json$"),
        ("tokenizer.json", "lacks tokenizer.json$"),
        ("model.safetensors", r"lacks \*\.safetensors$"),
    ],
)
def test_a_directory_that_lacks_a_file_is_refused(tmp_path, missing, message):
    for file in {"config.json", "tokenizer.json", "model.safetensors"} - {missing}:
        (tmp_path / file).touch()
    with pytest.raises(ModelError, match=message):
        resolve_model(str(tmp_path))


def test_a_name_that_can_be_nothing_lists_what_it_could_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for function in (resolve_model, find_model):
        with pytest.raises(ModelError, match=r"no alias .smollm2-135m., and not of the form owner"):
            function("smollm3")
    with pytest.raises(ModelError, match=r"there is no file absent.gguf"):
        resolve_model("absent.gguf")
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelError, match=r"weights\.bin is neither a directory nor a \.gguf file"):
        resolve_model("weights.bin")


def test_a_hub_that_cannot_be_reached_is_said_in_one_line(tmp_path):
    # Nothing listens on the discard port of this machine.
    answer, found = ask_hub(
        "owner/model", HF_HOME=str(tmp_path), HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0"
    )
    assert answer.startswith("ModelError: cannot get the model owner/model: ")
    assert len(answer.splitlines()) == 1
    assert "the hub at http://127.0.0.1:9" in answer
    assert "Connection refused" in answer
    assert str(tmp_path / "hub" / "models--owner--model") in answer
    assert found is None


def test_offline_a_missing_model_is_an_error_and_a_cached_one_is_used(tmp_path):
    snapshot = hub_snapshot(tmp_path, "owner", "cached")
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    answer, found = ask_hub("owner/absent", **environment)
    assert answer.startswith("ModelError: cannot get the model owner/absent: ")
    assert "HF_HUB_OFFLINE" in answer
    assert found is None
    assert ask_hub("owner/cached", **environment) == [str(snapshot), str(snapshot)]


def test_the_cache_is_where_the_user_wants_it(monkeypatch):
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == Path("/home/user/.cache/headrace")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/headrace")
    monkeypatch.setenv("HEADRACE_CACHE", "~/own")
    assert cache_dir() == Path("/home/user/own")


def test_the_default_is_the_first_alias_and_is_not_there_before_it_was_fetched(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    assert list_aliases()[0].alias == DEFAULT_ALIAS
    assert find_model(None) is None


def test_an_alias_wins_over_a_directory_of_that_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path(DEFAULT_ALIAS).mkdir()
    assert find_model(DEFAULT_ALIAS) is None


@pytest.mark.model
def test_the_default_model_is_the_published_file():
    files = default_model_files()
    assert files.kind == "gguf"
    assert files.name == DEFAULT_ALIAS
    assert files.path.stat().st_size == 98_362_432
    assert find_model(None) == find_model(DEFAULT_ALIAS) == files
    assert resolve_model(None, verify=True) == files
