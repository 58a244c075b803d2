"""Fair shares between tenants: how much service each has had, and who is owed some.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): the
tenant with the lowest counter is served first. Who had all that it asked for cannot save up
service: when it asks for more, its counter is lifted to the lowest of those that wait, or to the
highest there is if nobody waits, for then nobody is owed anything. The engine never idles for
fairness: whoever asks gets what others leave.
"""

from collections.abc import Mapping

__all__ = ["DECODE_COST", "PROMPT_COST", "Tenant", "TenantLedger"]

# Service of one token, as in the paper: output tokens cost the server more than prompt tokens.
PROMPT_COST = 1
DECODE_COST = 2

# Tenants without requests that are remembered, so that names made up by clients cannot pile up.
MAX_ABSENT_TENANTS = 10_000

# Weights are added up as multiples of this: whole numbers, so that sums stay exact and a fair share
# of two rows is 2, however often tenants come and go.
WEIGHT_UNIT = 1e-6


class Tenant:
    """One tenant's account.

    Attributes:
        weight: its share, relative to the others'.
        units: the weight as a whole number.
        service: service received, in tokens over weight.
        num_requests: its requests that wait or run.
        num_running: its requests that run.
    """

    __slots__ = ("_cost", "name", "num_requests", "num_running", "service", "units", "weight")

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.service = 0.0
        self.num_requests = 0
        self.num_running = 0
        self.set_weight(weight)

    def set_weight(self, weight: float) -> None:
        """Let the service from now on be counted by this weight."""
        self.weight = weight
        self.units = max(1, round(weight / WEIGHT_UNIT))
        self._cost = 1 / weight

    def charge(self, num_tokens: int) -> None:
        """Count service: tokens times their cost."""
        self.service += num_tokens * self._cost


class TenantLedger:
    """All accounts."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._tenants: dict[str, Tenant] = {}
        self._present: set[Tenant] = set()  # those with requests
        self._total_units = 0  # of these
        self._highest_absent = 0.0  # service of any that had left

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Let these weights hold from now on, and 1 for all others."""
        self._weights = dict(weights)
        for tenant in self._tenants.values():
            tenant.set_weight(self._weights.get(tenant.name, 1.0))
        self._total_units = sum(tenant.units for tenant in self._present)

    def arrive(self, name: str, *, first_waiting: Tenant | None) -> Tenant:
        """Count a request that came and return the account it is charged to.

        Args:
            name: of its tenant.
            first_waiting: the tenant with the lowest counter among those that have waiting
                requests.
        """
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, self._weights.get(name, 1.0))
        if tenant.num_requests == tenant.num_running:  # it had all that it asked for
            level = self._highest() if first_waiting is None else first_waiting.service
            tenant.service = max(tenant.service, level)
        if tenant.num_requests == 0:
            self._present.add(tenant)
            self._total_units += tenant.units
        tenant.num_requests += 1
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """Count a request that ended."""
        tenant.num_requests -= 1
        if tenant.num_requests == 0:
            self._present.remove(tenant)
            self._total_units -= tenant.units
            self._highest_absent = max(self._highest_absent, tenant.service)
            if len(self._tenants) - len(self._present) > MAX_ABSENT_TENANTS:
                self._forget_absent()

    def share(self, tenant: Tenant, amount: int) -> float:
        """Return the tenant's fair part of `amount` among those present."""
        return amount * tenant.units / self._total_units

    def _highest(self) -> float:
        return max([self._highest_absent, *(tenant.service for tenant in self._present)])

    def _forget_absent(self) -> None:
        """Drop absent tenants, first those that are owed nothing by being remembered."""
        absent = [tenant for tenant in self._tenants.values() if tenant not in self._present]
        absent.sort(key=lambda tenant: tenant.service)
        for tenant in absent[: len(absent) // 2]:
            del self._tenants[tenant.name]
