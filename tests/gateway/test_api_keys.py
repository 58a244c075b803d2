import hashlib
import json
import re
import stat

import pytest

from gateway.accounts import Quota
from gateway.api_keys import (
    ApiKey,
    KeyFileError,
    hash_of_key,
    new_key,
    read_keys,
    tenant_weights,
    write_keys,
)

SHA = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of "abc", FIPS 180-2
OTHER = hashlib.sha256(b"other").hexdigest()


def key(name="a", sha256=SHA, **fields) -> ApiKey:
    return ApiKey(name=name, sha256=sha256, **fields)


def written(path, content) -> object:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_keys_are_long_random_and_of_a_known_form():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"hr-[A-Za-z0-9_-]{43}", one) for one in keys)


def test_a_key_is_kept_as_its_sha_256():
    assert hash_of_key("abc") == SHA


def test_what_was_written_is_read_and_only_the_owner_may(tmp_path):
    path = tmp_path / "keys.json"
    keys = (key(), key("b", OTHER, tenant="team", weight=2.5, admin=True, tokens_per_minute=7))
    write_keys(path, keys)
    assert read_keys(path) == keys
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys.json"]


def test_the_file_can_be_written_by_hand(tmp_path):
    entry = {"name": "a", "sha256": SHA, "requests_per_minute": 60}
    [read] = read_keys(written(tmp_path / "k", {"keys": [entry]}))
    assert (read.tenant_name, read.weight, read.admin) == ("a", None, False)
    assert read.quota == Quota(requests_per_minute=60)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "truncated"),
        ("[]", "object"),
        ("{}", "keys"),
        ({"keys": [{"name": "a"}]}, "sha256"),
        ({"keys": [{"name": "a", "sha256": "abc"}]}, "sha256"),
        ({"keys": [{"name": "a", "sha256": SHA.upper()}]}, "sha256"),
        ({"keys": [{"name": "a\n", "sha256": SHA}]}, "name"),
        ({"keys": [{"name": "", "sha256": SHA}]}, "name"),
        ({"keys": [{"name": "two words", "sha256": SHA}]}, "name"),
        ({"keys": [{"name": "x" * 65, "sha256": SHA}]}, "name"),
        ({"keys": [{"name": "a", "sha256": SHA, "weigth": 2}]}, "weigth"),
        ({"keys": [{"name": "a", "sha256": SHA, "weight": 0}]}, "weight"),
        ({"keys": [{"name": "a", "sha256": SHA, "weight": "2"}]}, "weight"),
        ({"keys": [{"name": "a", "sha256": SHA, "tokens_per_minute": 0}]}, "tokens_per_minute"),
        ({"keys": [{"name": "a", "sha256": SHA, "tenant": "\n"}]}, "tenant"),
        ({"keys": [{"name": "a", "sha256": SHA}] * 2}, "two keys have the name 'a'"),
        (
            {"keys": [{"name": "a", "sha256": SHA}, {"name": "b", "sha256": SHA}]},
            "two keys have the sha256",
        ),
        (
            {
                "keys": [
                    {"name": "a", "sha256": SHA, "tenant": "t", "weight": 1},
                    {"name": "b", "sha256": OTHER, "tenant": "t", "weight": 2},
                ]
            },
            "the weight of the tenant 't' is 2 by the key 'b', and 1 elsewhere",
        ),
    ],
)
def test_a_wrong_file_is_refused_and_the_message_says_where(tmp_path, content, problem):
    with pytest.raises(KeyFileError, match=problem) as caught:
        read_keys(written(tmp_path / "k", content))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(KeyFileError, match="No such file"):
        read_keys(tmp_path / "none")


def test_keys_that_contradict_each_other_are_not_written(tmp_path):
    with pytest.raises(KeyFileError):
        write_keys(tmp_path / "k", [key(), key()])
    assert list(tmp_path.iterdir()) == []


def test_weights_come_from_the_options_and_the_keys():
    keys = [key("a", weight=2), key("b", OTHER, tenant="t"), key("c", "0" * 64, weight=3.0)]
    assert tenant_weights(keys, {"t": 5.0, "c": 3.0}) == {"t": 5.0, "a": 2, "c": 3.0}
    with pytest.raises(KeyFileError, match="'a' is 2 by the key 'a', and 4 elsewhere"):
        tenant_weights(keys, {"a": 4.0})
