import subprocess
from pathlib import Path

import orjson
import pytest

from bench.environment import describe_command, describe_environment, describe_revision


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["/some/where/headrace", "bench", "serve"], "headrace bench serve"),
        (["headrace", "--api-key", "secret", "--seed", "1"], "headrace --api-key '***' --seed 1"),
        (["headrace", "--api-key=secret"], "headrace '--api-key=***'"),
        (["headrace", "--model", "a b"], "headrace --model 'a b'"),
        (["headrace", "--api-key"], "headrace --api-key"),
        (["headrace", "--file", "/some/where/x.json"], "headrace --file x.json"),
        (["headrace", "--file=/some/where/x.json", "a/b"], "headrace --file=x.json a/b"),
    ],
)
def test_the_command_can_be_repeated_and_tells_no_secret(arguments: list[str], expected: str):
    assert describe_command(arguments) == expected


def test_the_environment_says_where_a_figure_comes_from():
    environment = describe_environment(["headrace", "bench"])
    assert {"date", "command", "machine", "load_average", "packages"} <= environment.keys()
    assert environment["machine"]["num_cpus"] >= 1
    assert "aiohttp" in environment["packages"]
    assert orjson.loads(orjson.dumps(environment)) is not None


def test_a_checkout_has_a_commit_and_knows_whether_it_was_changed(tmp_path: Path):
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True)

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-q", "-m", "first")
    revision = describe_revision(tmp_path)
    assert len(revision["commit"]) == 40
    assert revision["modified"] is False
    (tmp_path / "a").write_text("2")
    assert describe_revision(tmp_path)["modified"] is True


def test_an_installed_package_has_no_commit(tmp_path: Path):
    assert describe_revision(tmp_path / "missing") == {}
