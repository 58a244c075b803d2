"""On whose behalf a request is made: a name that it gives, or else the key that it carries."""

import hashlib

from gateway.errors import InvalidRequest

__all__ = ["MAX_TENANT_LENGTH", "is_tenant_name", "tenant_of", "tenant_of_key"]

MAX_TENANT_LENGTH = 64
DIGEST_LENGTH = 16


def tenant_of(named: str | None, *, default: str) -> str:
    """Return the tenant that a request names, or the default if it names none.

    Args:
        named: the field of the request.
        default: what `tenant_of_key` says about the connection.

    Raises:
        InvalidRequest: the name is none.
    """
    if named is None:
        return default
    if not is_tenant_name(named):
        raise InvalidRequest(
            f"tenant must have 1 to {MAX_TENANT_LENGTH} printable characters", param="tenant"
        )
    return named


def tenant_of_key(authorization: str | None) -> str:
    """Return the tenant behind an Authorization header: a digest of its bearer key, or "".

    A digest, so that the key itself gets into no log, no metric and no page.
    """
    scheme, _, key = (authorization or "").strip().partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        return ""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:DIGEST_LENGTH]


def is_tenant_name(name: str) -> bool:
    """Whether a tenant may be called so."""
    return 1 <= len(name) <= MAX_TENANT_LENGTH and name.isprintable()
