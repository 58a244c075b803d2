"""GET /v1/usage: who has used how much, for the holder of a key, and for admins of all keys."""

import time
from typing import Literal

import msgspec
from aiohttp import web

from gateway.accounts import Account
from gateway.app_keys import KEY_RING
from gateway.callers import caller_of

__all__ = ["UsageBody", "add_routes"]


class LimitsBody(msgspec.Struct, frozen=True, kw_only=True):
    """What the key may use; null sets no bound."""

    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_concurrent_requests: int | None


class KeyUsageBody(msgspec.Struct, frozen=True, kw_only=True):
    """What one key has used."""

    object: Literal["key.usage"] = "key.usage"
    key: str
    requests: int
    requests_running: int
    requests_refused: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    busy_s: float
    limits: LimitsBody


class UsageBody(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that the caller may see."""

    object: Literal["list"] = "list"
    since_unix_s: float
    data: list[KeyUsageBody]


def add_routes(app: web.Application) -> None:
    """Serve /v1/usage."""
    app.router.add_get("/v1/usage", _Usage(since_unix_s=time.time()).usage)


class _Usage:
    """The counters since the server started."""

    def __init__(self, since_unix_s: float) -> None:
        self._since_unix_s = since_unix_s

    async def usage(self, request: web.Request) -> web.Response:
        caller = caller_of(request)
        accounts = request.app[KEY_RING].accounts if caller.is_admin else [caller.account]
        body = UsageBody(
            since_unix_s=round(self._since_unix_s, 3),
            data=[_entry(account) for account in accounts],
        )
        return web.Response(
            body=msgspec.json.encode(body),
            content_type="application/json",
            headers={"Cache-Control": "no-store"},
        )


def _entry(account: Account) -> KeyUsageBody:
    usage, quota = account.usage, account.quota
    return KeyUsageBody(
        key=account.name,
        requests=usage.num_requests,
        requests_running=account.num_running,
        requests_refused=usage.num_refused,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        busy_s=round(usage.busy_s, 6),
        limits=LimitsBody(
            requests_per_minute=quota.requests_per_minute,
            tokens_per_minute=quota.tokens_per_minute,
            max_concurrent_requests=quota.max_concurrent_requests,
        ),
    )
