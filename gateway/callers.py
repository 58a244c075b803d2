"""On whose behalf a request is made: what the authentication found out, for the handlers."""

from dataclasses import dataclass

from aiohttp import web

from gateway.accounts import Account
from gateway.errors import Forbidden
from gateway.tenants import check_tenant_name, tenant_of_key

__all__ = ["CALLER", "Caller", "anonymous_caller", "caller_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Who asks.

    Attributes:
        account: pays for what is asked.
        principal: what tokens and tickets are bound to: the same for the same key only.
        tenant: on whose behalf.
        key_name: of the API key; None on a server that has none.
        is_admin: whether the caller may see what concerns all.
    """

    account: Account
    principal: str = ""
    tenant: str = ""
    key_name: str | None = None
    is_admin: bool = True

    def tenant_of(self, named: str | None) -> str:
        """Return the tenant of a request that names this one, or none.

        With a key, it is the key's: a request cannot make itself somebody else's.

        Raises:
            gateway.errors.GatewayError: InvalidRequest if the name is none, Forbidden if it is
                another tenant's.
        """
        if named is None:
            return self.tenant
        check_tenant_name(named)
        if self.key_name is not None and named != self.tenant:
            raise Forbidden(
                "tenant is not the one that this API key belongs to",
                param="tenant",
                code="tenant_not_allowed",
            )
        return named


CALLER: web.RequestKey[Caller] = web.RequestKey("CALLER", Caller)


def caller_of(request: web.Request) -> Caller:
    """Return who makes this request, as the authentication found out."""
    return request[CALLER]


def anonymous_caller(account: Account, authorization: str | None) -> Caller:
    """Return who asks a server without keys; a key that is sent all the same names the tenant."""
    tenant = tenant_of_key(authorization)
    return Caller(account=account, principal=tenant, tenant=tenant)
