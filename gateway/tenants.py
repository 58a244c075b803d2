"""On whose behalf a request is made: a name that it gives, or else the key that it carries."""

import hashlib

from gateway.errors import InvalidRequest

__all__ = ["MAX_TENANT_LENGTH", "check_tenant_name", "is_tenant_name", "tenant_of_key"]

MAX_TENANT_LENGTH = 64
DIGEST_LENGTH = 16


def check_tenant_name(name: str) -> None:
    """Refuse a request whose `tenant` field is no name.

    Raises:
        InvalidRequest: it is none.
    """
    if not is_tenant_name(name):
        raise InvalidRequest(
            f"tenant must have 1 to {MAX_TENANT_LENGTH} printable characters", param="tenant"
        )


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
