"""Who may come in: the keys in force, the account of each, and tickets for browsers.

A browser cannot send a header with a websocket handshake, and a key in an address would end up in
logs and histories. So a page trades its key for a ticket: good once, for seconds, and for nothing
but the handshake.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.accounts import Account
from gateway.api_keys import ApiKey
from gateway.callers import Caller, anonymous_caller
from gateway.errors import Overloaded, Unauthorized

__all__ = ["TICKET_LIFETIME_S", "KeyRing"]

TICKET_LIFETIME_S = 30.0
TICKET_BYTES = 32
MAX_TICKETS = 1000  # unused ones, of each account

ANONYMOUS = "anonymous"


@dataclass(frozen=True, slots=True)
class _Entry:
    """A key in force."""

    digest: bytes
    key: ApiKey
    account: Account


@dataclass(frozen=True, slots=True)
class _Ticket:
    caller: Caller
    expires_s: float


class KeyRing:
    """All keys of a gateway, replaced as a whole. Use it on the event loop only.

    Args:
        keys: None lets everybody in. No key at all lets nobody in.
        clock: seconds, for quotas and tickets.
    """

    def __init__(
        self, keys: Sequence[ApiKey] | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._anonymous = Account(ANONYMOUS, clock=clock)
        self._entries: list[_Entry] | None = None
        self._tickets: dict[bytes, _Ticket] = {}
        if keys is not None:
            self.replace(keys)

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        return self._entries is None

    @property
    def accounts(self) -> list[Account]:
        """The accounts of the keys in force, or the one that everybody shares."""
        if self._entries is None:
            return [self._anonymous]
        return [entry.account for entry in self._entries]

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """Let these keys in from now on, and no others.

        Accounts go on under their names. A key that is gone, or that became another one, or of
        another tenant, or of an admin, or of none, begins nothing more as what it was, on open
        websockets either.
        """
        old = {entry.key.name: entry for entry in self._entries or ()}
        entries = []
        for key in keys:
            digest = bytes.fromhex(key.sha256)
            entry = old.get(key.name)
            if entry is not None and _is_same_caller(entry.key, key):
                del old[key.name]
                account = entry.account
                account.quota = key.quota
            else:
                usage = None if entry is None else entry.account.usage
                account = Account(key.name, key.quota, usage=usage, clock=self._clock)
            entries.append(_Entry(digest, key, account))
        for entry in old.values():
            entry.account.close()
        self._entries = entries

    def caller(self, authorization: str | None) -> Caller:
        """Return who sends this Authorization header.

        Raises:
            Unauthorized: a key is needed, and this is none of ours.
        """
        if self._entries is None:
            return anonymous_caller(self._anonymous, authorization)
        scheme, _, presented = (authorization or "").strip().partition(" ")
        presented = presented.strip()
        if scheme.lower() != "bearer" or not presented:
            raise Unauthorized("send your API key in the header Authorization: Bearer KEY")
        digest = hashlib.sha256(presented.encode(errors="surrogateescape")).digest()
        found = None
        for entry in self._entries:  # all of them: the time taken says nothing about any
            if hmac.compare_digest(entry.digest, digest):
                found = entry
        if found is None:
            raise Unauthorized("this API key is not known")
        return Caller(
            account=found.account,
            principal=found.key.sha256,
            tenant=found.key.tenant_name,
            key_name=found.key.name,
            is_admin=found.key.admin,
        )

    def issue_ticket(self, caller: Caller) -> str:
        """Return a ticket that stands for this caller, once.

        Raises:
            Overloaded: the caller has too many that it did not use.
        """
        now_s = self._clock()
        self._tickets = {k: t for k, t in self._tickets.items() if t.expires_s > now_s}
        unused = sum(t.caller.account is caller.account for t in self._tickets.values())
        if unused >= MAX_TICKETS:
            raise Overloaded(
                "too many tickets wait to be used",
                retry_after_s=TICKET_LIFETIME_S,
                code="too_many_tickets",
            )
        ticket = secrets.token_urlsafe(TICKET_BYTES)
        self._tickets[_digest(ticket)] = _Ticket(caller, now_s + TICKET_LIFETIME_S)
        return ticket

    def redeem(self, ticket: str) -> Caller:
        """Return the caller that a ticket stands for; it is used up by that.

        Raises:
            Unauthorized: it is not known, was used before, or is too old; or its key is gone.
        """
        found = self._tickets.pop(_digest(ticket), None)
        if found is None or found.expires_s <= self._clock() or found.caller.account.is_closed:
            raise Unauthorized("this ticket is not valid any more")
        return found.caller


def _is_same_caller(old: ApiKey, new: ApiKey) -> bool:
    """Whether whoever came with the old key may go on as who the new one makes of them."""
    before, after = ((key.sha256, key.tenant_name, key.admin) for key in (old, new))
    return before == after


def _digest(ticket: str) -> bytes:
    """A dictionary looks up what it is asked for as fast as it can: so not the ticket itself."""
    return hashlib.sha256(ticket.encode(errors="surrogateescape")).digest()
