from click.testing import CliRunner

from bench.cli import bench


def test_the_measuring_commands_are_listed():
    result = CliRunner().invoke(bench, ["--help"])
    assert result.exit_code == 0
    assert "serve" in result.output
    assert "startup" in result.output
