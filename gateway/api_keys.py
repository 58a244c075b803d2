"""API keys, and the file that holds them: hashed, so that whoever reads the file has no key.

A key is "hr-" and 43 characters of `A-Z a-z 0-9 - _` made of 256 random bits. That much cannot be
guessed, so a plain SHA-256 protects it; salts and slow hashes are for passwords.
"""

import hashlib
import json
import os
import secrets
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.accounts import Quota
from gateway.tenants import is_tenant_name

__all__ = [
    "ApiKey",
    "KeyFileError",
    "hash_of_key",
    "new_key",
    "read_keys",
    "tenant_weights",
    "write_keys",
]

KEY_PREFIX = "hr-"
KEY_BYTES = 32

Bound = Annotated[int, Meta(ge=1, le=2**53)]


class KeyFileError(ValueError):
    """The file is not there, or not what it should be; the message says so in one line."""


class ApiKey(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One key, as in the file.

    Attributes:
        name: for logs, metrics and lists; also the tenant if none is given.
        sha256: of the key, in hexadecimal.
        created: date of its making, for people.
        tenant: whose requests come with it. Keys of one tenant share its turns and its prefixes.
        weight: of the tenant; None leaves it at what `--tenant-weight` says, or 1.
        admin: may see what concerns all: metrics, steps, everybody's usage.
        requests_per_minute, tokens_per_minute, max_concurrent_requests: as in Quota.
    """

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:@-]{1,64}\Z")]
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    created: str = ""
    tenant: str | None = None
    weight: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    admin: bool = False
    requests_per_minute: Bound | None = None
    tokens_per_minute: Bound | None = None
    max_concurrent_requests: Bound | None = None

    @property
    def tenant_name(self) -> str:
        return self.name if self.tenant is None else self.tenant

    @property
    def quota(self) -> Quota:
        return Quota(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            max_concurrent_requests=self.max_concurrent_requests,
        )


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of the file."""

    keys: list[ApiKey]


def new_key() -> str:
    """Return a key that nobody has yet."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_of_key(key: str) -> str:
    """Return what is kept of a key."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Return the keys of a file.

    Raises:
        KeyFileError: it cannot be read, or a key of it is wrong, or two contradict each other.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise KeyFileError(f"it cannot be read: {os.strerror(error.errno or 0)}") from error
    try:
        keys = msgspec.json.decode(data, type=_KeyFile).keys
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KeyFileError(str(error)) from None
    _check(keys)
    return tuple(keys)


def write_keys(path: Path, keys: Sequence[ApiKey]) -> None:
    """Replace the file so that a reader sees the old keys or the new ones; only its owner reads it.

    Raises:
        KeyFileError: the keys contradict each other.
        OSError: it cannot be written.
    """
    _check(keys)
    text = json.dumps({"keys": msgspec.to_builtins(keys)}, indent=2, ensure_ascii=False)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def tenant_weights(keys: Sequence[ApiKey], given: Mapping[str, float]) -> dict[str, float]:
    """Return the weight of each tenant that has one: by `--tenant-weight`, or by its keys.

    Raises:
        KeyFileError: two places say different weights for one tenant.
    """
    weights = dict(given)
    for key in keys:
        if key.weight is None:
            continue
        if weights.setdefault(key.tenant_name, key.weight) != key.weight:
            raise KeyFileError(
                f"the weight of the tenant {key.tenant_name!r} is {key.weight:g} by the key "
                f"{key.name!r}, and {weights[key.tenant_name]:g} elsewhere"
            )
    return weights


def _check(keys: Sequence[ApiKey]) -> None:
    for what, values in (
        ("name", [key.name for key in keys]),
        ("sha256", [key.sha256 for key in keys]),
    ):
        twice = [value for value, count in Counter(values).items() if count > 1]
        if twice:
            raise KeyFileError(f"two keys have the {what} {twice[0]!r}")
    for key in keys:
        if not is_tenant_name(key.tenant_name):
            raise KeyFileError(f"the tenant of the key {key.name!r} cannot be a tenant's name")
    tenant_weights(keys, {})
