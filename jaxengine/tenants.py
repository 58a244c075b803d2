"""Fair shares between tenants: how much service each has had, and who is owed some.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024), with
the start-time rule of fair queueing for those who return: a tenant that was away is lifted to the
virtual time, so it cannot save up service. The tenant with the lowest counter is served first.
The engine never idles for fairness: whoever asks gets what others leave.
"""

from collections.abc import Mapping

__all__ = ["DECODE_COST", "PROMPT_COST", "Tenant", "TenantLedger"]

# Service of one token, as in the paper: output tokens cost the server more than prompt tokens.
PROMPT_COST = 1
DECODE_COST = 2

# Tenants without requests that are remembered, so that names made up by clients cannot pile up.
MAX_ABSENT_TENANTS = 10_000


class Tenant:
    """One tenant's account.

    Attributes:
        weight: its share, relative to the others'.
        service: service received, in tokens over weight.
        num_requests: its requests that wait or run.
        num_running: its requests that run.
    """

    __slots__ = ("_cost", "name", "num_requests", "num_running", "service", "weight")

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.service = 0.0
        self.num_requests = 0
        self.num_running = 0
        self._cost = 1 / weight

    def charge(self, num_tokens: int) -> None:
        """Count service: tokens times their cost."""
        self.service += num_tokens * self._cost


class TenantLedger:
    """All accounts, and the virtual time."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._tenants: dict[str, Tenant] = {}
        self._virtual_time = 0.0
        self._total_weight = 0.0  # of tenants with requests
        self._num_present = 0

    def arrive(self, name: str) -> Tenant:
        """Count a request that came and return the account it is charged to."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, self._weights.get(name, 1.0))
        if tenant.num_requests == 0:
            tenant.service = max(tenant.service, self._virtual_time)
            self._total_weight += tenant.weight
            self._num_present += 1
        tenant.num_requests += 1
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """Count a request that ended."""
        tenant.num_requests -= 1
        if tenant.num_requests == 0:
            self._total_weight -= tenant.weight
            self._num_present -= 1
            if len(self._tenants) - self._num_present > MAX_ABSENT_TENANTS:
                self._forget_absent()

    def note_served(self, tenant: Tenant) -> None:
        """Move the virtual time: this tenant is chosen now."""
        self._virtual_time = max(self._virtual_time, tenant.service)

    def share(self, tenant: Tenant, amount: float) -> float:
        """Return the tenant's fair part of `amount` among those present."""
        return amount * tenant.weight / self._total_weight

    def _forget_absent(self) -> None:
        """Drop absent tenants, first those that are owed nothing by being remembered."""
        absent = [tenant for tenant in self._tenants.values() if tenant.num_requests == 0]
        absent.sort(key=lambda tenant: tenant.service)
        for tenant in absent[: len(absent) // 2]:
            del self._tenants[tenant.name]
