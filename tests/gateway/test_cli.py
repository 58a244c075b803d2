import gc
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from gateway import cli
from gateway.cli import COMMANDS, SERVE_EXTRA_MODULES, CommandEntry, LazyGroup, load_command, main

ROOT = Path(__file__).parents[2]


class OurError(Exception):
    """An error that one of our packages defines."""


OurError.__module__ = "jaxengine.errors"


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A headrace whose commands are defined here."""

    def fail_with(error: BaseException) -> click.Command:
        def run() -> None:
            raise error

        return click.Command("x", callback=run)

    table = {
        "fine": click.Command("fine", callback=lambda: click.echo("done")),
        "ours": fail_with(OurError("the model is too large")),
        "bug": fail_with(ZeroDivisionError("oops")),
        "usage": fail_with(click.UsageError("that makes no sense")),
        "interrupted": fail_with(KeyboardInterrupt()),
        "leaves": click.Command("leaves", callback=lambda: click.get_current_context().exit(7)),
    }
    monkeypatch.setattr(cli, "load_command", lambda target: table[target])
    entries = {name: CommandEntry(name, f"Summary of {name}.") for name in table}
    monkeypatch.setattr(cli.headrace, "_entries", entries)


@pytest.mark.usefixtures("commands")
class TestExitCodes:
    def test_a_command_that_ends_well_is_0(self, capsys: pytest.CaptureFixture[str]):
        assert main(["fine"]) == 0
        assert capsys.readouterr().out == "done\n"

    def test_an_error_of_ours_is_one_line_and_1(self, capsys: pytest.CaptureFixture[str]):
        assert main(["ours"]) == 1
        assert capsys.readouterr().err == "Error: the model is too large\n"

    def test_an_error_of_ours_is_raised_where_its_traceback_is_wanted(self):
        with pytest.raises(OurError):
            main(["--traceback", "ours"])

    def test_a_bug_keeps_its_traceback(self):
        with pytest.raises(ZeroDivisionError):
            main(["bug"])

    @pytest.mark.parametrize("arguments", [["usage"], ["nothing"], ["fine", "--loud"]])
    def test_a_wrong_command_line_is_2(
        self, arguments: list[str], capsys: pytest.CaptureFixture[str]
    ):
        assert main(arguments) == 2
        assert "Error: " in capsys.readouterr().err

    def test_an_interrupt_is_130_without_a_word(self, capsys: pytest.CaptureFixture[str]):
        assert main(["interrupted"]) == 130
        assert capsys.readouterr().err.strip() == ""

    def test_a_command_may_choose_its_own(self):
        assert main(["leaves"]) == 7

    def test_help_and_version_are_0(self, capsys: pytest.CaptureFixture[str]):
        assert main(["--help"]) == 0
        assert "Summary of ours." in capsys.readouterr().out
        assert main(["--version"]) == 0
        assert capsys.readouterr().out.startswith("headrace ")


def test_every_command_exists_and_is_one():
    for entry in COMMANDS.values():
        assert isinstance(load_command(entry.target), click.Command)
        assert gc.isenabled()


def test_help_imports_no_command():
    group = LazyGroup(name="x", entries={"broken": CommandEntry("no.such:module", "It is broken.")})
    help_page = group.get_help(click.Context(group))
    assert "broken  It is broken." in help_page


def write_module(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_missing_extra_is_one_sentence_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text = "raise ModuleNotFoundError('No module', name='jax.numpy')"
    write_module(tmp_path, "needs_jax", text, monkeypatch)
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(click.ClickException) as error:
        load_command("needs_jax:command")
    assert error.value.message == (
        "this command needs jax, which is not installed: pip install 'headrace[serve]'"
    )


def test_an_installed_package_that_is_broken_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_module(tmp_path, "needs_numpy", "import numpy.no_such_part", monkeypatch)
    with pytest.raises(ModuleNotFoundError, match="no_such_part"):
        load_command("needs_numpy:command")


def test_a_wrong_import_of_our_own_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_module(tmp_path, "typo", "import headrace_typo", monkeypatch)
    with pytest.raises(ModuleNotFoundError, match="headrace_typo"):
        load_command("typo:command")


def test_a_target_that_is_no_command_is_said_to_be_none():
    with pytest.raises(TypeError, match="COMMANDS is a dict, not a command"):
        load_command("gateway.cli:COMMANDS")


def test_the_modules_of_the_extra_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {
        requirement.split(">")[0].split("[")[0].replace("-", "_")
        for requirement in project["optional-dependencies"]["serve"]
    }
    assert names == SERVE_EXTRA_MODULES


def test_the_module_can_be_run():
    command = [sys.executable, "-m", "gateway.cli", "--version"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert answer.stdout.startswith("headrace ")
