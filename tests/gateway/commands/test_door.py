import json

import click
import pytest

from fakes import FakeEngine
from gateway.api_keys import hash_of_key
from gateway.commands.door import Door
from gateway.errors import Unauthorized


def options(**changes):
    """What the command line gives where nothing is said about keys, changed."""
    return {
        "api_key": (),
        "api_keys_file": None,
        "tenant_weight": (),
        "ssl_certfile": None,
        "ssl_keyfile": None,
    } | changes


def write(path, *entries) -> object:
    keys = [{"sha256": hash_of_key(entry["name"])} | entry for entry in entries]
    path.write_text(json.dumps({"keys": keys}))
    return path


def names(door) -> list[str]:
    return [account.name for account in door.key_ring.accounts]


def test_without_keys_the_door_is_open_and_says_so():
    door = Door(options())
    assert door.key_ring.is_open
    assert door.tls is None
    assert "everybody" in door.description


def test_a_file_without_keys_lets_nobody_in(tmp_path):
    door = Door(options(api_keys_file=write(tmp_path / "k")))
    assert not door.key_ring.is_open
    with pytest.raises(Unauthorized):
        door.key_ring.caller("Bearer x")


def test_keys_come_from_the_command_line_and_the_file(tmp_path):
    path = write(tmp_path / "k", {"name": "alice", "weight": 2.0})
    door = Door(
        options(api_key=("0123456789abcdef",), api_keys_file=path, tenant_weight=(("bob", 3.0),))
    )
    assert names(door) == ["api-key-1", "alice"]
    given = door.key_ring.caller("Bearer 0123456789abcdef")
    assert given.is_admin
    assert given.tenant == hash_of_key("0123456789abcdef")[:16]  # as without keys
    assert door.tenant_weights == {"alice": 2.0, "bob": 3.0}
    assert door.description == "API keys    2"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"api_key": ("short",)}, "at least 16"),
        ({"api_key": ("x" * 20 + "é",)}, "ASCII"),
        ({"ssl_keyfile": "k"}, "--ssl-keyfile needs --ssl-certfile"),
        ({"ssl_certfile": "none.crt"}, "--ssl-certfile: .* No such file"),
        ({"api_keys_file": "none"}, "--api-keys-file none: it cannot be read"),
    ],
)
def test_what_cannot_work_is_refused_by_option(tmp_path, monkeypatch, changes, problem):
    monkeypatch.chdir(tmp_path)
    changes = {
        name: tmp_path.__class__(value) if isinstance(value, str) else value
        for name, value in changes.items()
    }
    with pytest.raises(click.UsageError, match=problem):
        Door(options(**changes))


def test_weights_that_contradict_the_command_line_are_refused(tmp_path):
    path = write(tmp_path / "k", {"name": "alice", "weight": 2.0})
    with pytest.raises(click.UsageError, match="the weight of the tenant 'alice'"):
        Door(options(api_keys_file=path, tenant_weight=(("alice", 1.0),)))


async def test_a_reload_brings_keys_and_weights_into_force(tmp_path, caplog):
    path = write(tmp_path / "k", {"name": "alice"})
    door, engine = Door(options(api_keys_file=path, tenant_weight=(("bob", 3.0),))), FakeEngine()
    write(path, {"name": "alice", "weight": 5.0, "requests_per_minute": 9}, {"name": "carol"})
    with caplog.at_level("INFO"):
        door.reload(engine)
    assert names(door) == ["alice", "carol"]
    assert door.key_ring.caller("Bearer alice").account.quota.requests_per_minute == 9
    assert engine.tenant_weights == {"alice": 5.0, "bob": 3.0}
    assert "2 API keys are in force" in caplog.text


@pytest.mark.parametrize("content", ["", '{"keys": [', '{"keys": [{"name": "x"}]}', None])
async def test_a_bad_file_keeps_the_old_keys_and_says_so(tmp_path, caplog, content):
    path = write(tmp_path / "k", {"name": "alice", "weight": 5.0})
    door, engine = Door(options(api_keys_file=path)), FakeEngine()
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    door.reload(engine)
    assert names(door) == ["alice"]
    assert engine.tenant_weights == {}
    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert "the API keys stay as they were" in record.getMessage()


async def test_a_reload_with_nothing_to_read_is_harmless(caplog):
    with caplog.at_level("INFO"):
        Door(options()).reload(FakeEngine())
    assert "neither a key file nor a certificate" in caplog.text
