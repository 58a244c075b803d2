"""Who loses its row for another request, and its blocks too where these are lacking.

Two occasions: a running request must grow and no block is free (`pick_victim`), and a waiting
request should run rather than one that does (`pick_displaced`). Who lost blocks is computed anew;
who lost a row only waits with its blocks (`paused`). The eldest of the running, by
rank, never gives way: whoever is eldest runs to its end, and everyone becomes eldest in time, so
nothing starves however small the cache. Short of that, a prompt that has begun gets no tokens while
another should go first (`goes_first`).
"""

from collections.abc import Callable, Collection

from jaxengine.request import Request
from jaxengine.tenants import Tenant

__all__ = ["goes_first", "is_owed_row", "may_displace", "pick_displaced", "pick_victim"]


def goes_first(waiting: Request, begun: Request) -> bool:
    """Whether a waiting request should get tokens before one whose prompt has begun."""
    waits, runs = waiting.account, begun.account
    if waits is not runs:
        return (waits.service, waits.num_running) < (runs.service, runs.num_running)
    return waiting.priority < begun.priority and waiting.rank < begun.rank


def pick_victim(running: Collection[Request]) -> Request:
    """Return the request that gives way when blocks run out.

    It is the last by rank of the tenant that has the most running requests for its weight; the
    eldest of all only if nobody else is left.
    """
    eldest = min(running, key=lambda request: request.rank)
    return max(
        (request for request in running if request is not eldest),
        key=lambda request: (request.account.num_running / request.account.weight, request.rank),
        default=eldest,
    )


def may_displace(
    waiting: Request, running: Collection[Request], *, fair_rows: Callable[[Tenant], float]
) -> bool:
    """Whether `pick_displaced` can find anybody at all; quick, because mostly it cannot."""
    if is_owed_row(waiting, running, fair_rows=fair_rows):
        return True
    priority, own = waiting.priority, waiting.account
    return any(request.priority > priority and request.account is own for request in running)


def is_owed_row(
    waiting: Request, running: Collection[Request], *, fair_rows: Callable[[Tenant], float]
) -> bool:
    """Whether a tenant has more rows than its fair share, and that of a waiting request fewer."""
    own = waiting.account
    if own.num_running + 1 > max(1.0, fair_rows(own)):
        return False
    others = {request.account for request in running} - {own}
    return any(account.num_running - 1 >= fair_rows(account) for account in others)


def pick_displaced(
    waiting: Request,
    running: Collection[Request],
    *,
    fair_rows: Callable[[Tenant], float],
    num_holders: Callable[[int], int],
    lacks_row: bool,
    lacking_blocks: int,
    kept: Collection[Request] = (),
) -> list[Request]:
    """Return the running requests that should make room for a waiting one, or none of them.

    A request yields to one of its own tenant that has a better priority and a better rank (after
    long enough, waiting makes up for priority), and to one of a tenant below its fair share of
    rows while its own tenant has more than its share. Neither can be turned around afterwards, so
    requests do not displace each other in circles.

    Args:
        waiting: the request that would start.
        running: those that run; at least one.
        fair_rows: the share of the rows that a tenant is due.
        num_holders: how many requests hold a block; it is free once all of them have yielded.
        lacks_row: whether the waiting request needs a row.
        lacking_blocks: blocks that it needs besides those that are free.
        kept: those that must not yield now.
    """
    eldest = min(running, key=lambda request: request.rank)
    rows = {request.account: request.account.num_running for request in running}
    own = waiting.account
    is_below_share = rows.get(own, 0) + 1 <= max(1.0, fair_rows(own))
    displaced: list[Request] = []
    num_yielded: dict[int, int] = {}
    for request in sorted(running, key=lambda request: request.rank, reverse=True):
        if not lacks_row and lacking_blocks <= 0:
            break
        account = request.account
        if account is own:
            yields = waiting.priority < request.priority and waiting.rank < request.rank
        else:
            yields = is_below_share and rows[account] - 1 >= fair_rows(account)
        if yields and request is not eldest and request not in kept:
            displaced.append(request)
            rows[account] -= 1
            lacks_row = False
            for block_id in request.block_ids if lacking_blocks > 0 else ():
                num_yielded[block_id] = num_yielded.get(block_id, 0) + 1
                lacking_blocks -= num_yielded[block_id] == num_holders(block_id)
    return [] if lacks_row or lacking_blocks > 0 else displaced
