import re

import pytest
from click.testing import CliRunner

from gateway.accounts import Quota
from gateway.api_keys import hash_of_key, read_keys
from gateway.commands.keys import keys


@pytest.fixture
def run(tmp_path):
    """Run `headrace keys` on one file; return exit code, stdout and stderr."""

    def run_one(*arguments):
        environment = {"HEADRACE_API_KEYS_FILE": str(tmp_path / "keys.json")}
        result = CliRunner(env=environment).invoke(keys, arguments, catch_exceptions=False)
        return result.exit_code, result.stdout, result.stderr

    return run_one


def test_a_new_key_is_shown_once_and_kept_as_a_hash(run, tmp_path):
    code, out, err = run("new", "alice", "--tenant", "team", "--weight", "2", "--admin")
    assert code == 0
    assert re.fullmatch(r"hr-[A-Za-z0-9_-]{43}\n", out)
    assert "SIGHUP" in err
    [key] = read_keys(tmp_path / "keys.json")
    assert (key.name, key.tenant, key.weight, key.admin) == ("alice", "team", 2.0, True)
    assert key.sha256 == hash_of_key(out.strip())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", key.created)
    assert out.strip() not in (tmp_path / "keys.json").read_text()


def test_limits_are_kept(run, tmp_path):
    run("new", "a", "--requests-per-minute", "1", "--tokens-per-minute", "2")
    run("new", "b", "--max-concurrent-requests", "3")
    assert [key.quota for key in read_keys(tmp_path / "keys.json")] == [
        Quota(requests_per_minute=1, tokens_per_minute=2),
        Quota(max_concurrent_requests=3),
    ]


def test_the_list_shows_everything_but_the_keys(run):
    _, secret, _ = run("new", "alice", "--tokens-per-minute", "10000")
    code, out, _ = run("list")
    assert code == 0
    assert "alice" in out
    assert "10,000 tokens/min" in out
    assert secret.strip() not in out
    assert hash_of_key(secret.strip())[:8] not in out


def test_a_revoked_key_is_gone_and_the_others_stay(run, tmp_path):
    run("new", "alice")
    run("new", "bob")
    assert run("revoke", "alice")[0] == 0
    assert [key.name for key in read_keys(tmp_path / "keys.json")] == ["bob"]


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["new", "alice"], 1, "there is a key alice already"),
        (["new", "two words"], 2, "name"),
        (["new", "bob", "--weight", "0"], 2, "weight"),
        (["new", "bob", "--weight", "nan"], 2, "weight"),
        (["new", "bob", "--tenant", "alice", "--weight", "3"], 1, "weight of the tenant 'alice'"),
        (["new", "bob", "--tokens-per-minute", "0"], 2, "tokens-per-minute"),
        (["revoke", "nobody"], 1, "there is no key nobody"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(run, tmp_path, arguments, code, problem):
    run("new", "alice", "--weight", "2")
    before = (tmp_path / "keys.json").read_bytes()
    got, _, err = run(*arguments)
    assert got == code
    assert problem in err
    assert (tmp_path / "keys.json").read_bytes() == before


def test_a_file_that_is_none_is_said(run, tmp_path):
    assert run("list")[0] == 1
    (tmp_path / "keys.json").write_text("[]")
    for arguments in (["list"], ["new", "a"], ["revoke", "a"]):
        code, _, err = run(*arguments)
        assert (code, "keys.json" in err) == (1, True)
