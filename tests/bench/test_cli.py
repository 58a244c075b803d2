import click
import pytest
from click.testing import CliRunner

from bench.cli import COMMANDS, bench


def test_the_measuring_commands_are_listed():
    result = CliRunner().invoke(bench, ["--help"])
    assert result.exit_code == 0
    for name, entry in COMMANDS.items():
        assert name in result.output
        assert entry.summary in " ".join(result.output.split())


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_can_be_loaded_and_explains_itself(name: str):
    command = bench.get_command(click.Context(bench), name)
    assert command is not None
    assert command.name == name
    result = CliRunner().invoke(bench, [name, "--help"])
    assert result.exit_code == 0
