import gc

import pytest

from jaxengine.tenants import MAX_ABSENT_TENANTS, Tenant, TenantLedger


def arrive(
    ledger: TenantLedger, name: str, *, first_waiting: Tenant | None = None, running: bool = True
) -> Tenant:
    """A request comes, and runs at once unless told otherwise."""
    tenant = ledger.arrive(name, first_waiting=first_waiting)
    tenant.num_running += running
    return tenant


def leave(ledger: TenantLedger, tenant: Tenant) -> None:
    tenant.num_running = max(0, tenant.num_running - 1)
    ledger.leave(tenant)


def test_service_is_tokens_over_weight():
    ledger = TenantLedger({"heavy": 4.0})
    heavy, normal = arrive(ledger, "heavy"), arrive(ledger, "normal")
    heavy.charge(8)
    normal.charge(8)
    assert (heavy.service, normal.service) == (2.0, 8.0)


def test_a_name_has_one_account():
    ledger = TenantLedger({})
    first = arrive(ledger, "a")
    assert arrive(ledger, "a") is first
    assert first.num_requests == 2
    leave(ledger, first)
    leave(ledger, first)
    assert first.num_requests == 0
    assert arrive(ledger, "a") is first


def test_rows_are_shared_by_the_weights_of_those_present():
    ledger = TenantLedger({"b": 3.0})
    a = arrive(ledger, "a")
    assert ledger.share(a, 8) == 8
    b = arrive(ledger, "b")
    arrive(ledger, "b")
    assert (ledger.share(a, 8), ledger.share(b, 8)) == (2, 6)
    leave(ledger, b)
    assert ledger.share(a, 8) == 2
    leave(ledger, b)
    assert ledger.share(a, 8) == 8


@pytest.mark.parametrize("weight", [0.1, 0.3, 0.7])
def test_shares_stay_exact_however_often_tenants_come_and_go(weight):
    ledger = TenantLedger({"a": weight, "b": weight, "c": 0.9, "d": 1e-6})
    a, b = arrive(ledger, "a"), arrive(ledger, "b")
    for _ in range(1000):
        for name in "cd":
            leave(ledger, arrive(ledger, name))
    assert ledger.share(a, 4) == ledger.share(b, 4) == 2.0


# Nobody saves up service.


def test_who_comes_while_somebody_waits_is_lifted_to_the_first_that_waits():
    ledger = TenantLedger({})
    a = arrive(ledger, "a", running=False)
    a.charge(100)
    assert arrive(ledger, "b", first_waiting=a).service == 100


def test_who_comes_while_nobody_waits_is_lifted_to_the_highest():
    ledger = TenantLedger({})
    a, b = arrive(ledger, "a"), arrive(ledger, "b")
    a.charge(100)
    b.charge(30)
    assert arrive(ledger, "c").service == 100


def test_who_comes_to_an_idle_engine_is_lifted_to_the_highest_that_left():
    ledger = TenantLedger({})
    for name, service in (("a", 100), ("b", 20)):
        tenant = arrive(ledger, name)
        tenant.charge(service)
        leave(ledger, tenant)
    assert arrive(ledger, "c").service == 120  # b was lifted to 100, too
    assert arrive(ledger, "a").service == 120


def test_who_has_used_more_is_not_forgiven():
    ledger = TenantLedger({})
    a = arrive(ledger, "a")
    a.charge(500)
    leave(ledger, a)
    b = arrive(ledger, "b", running=False)
    b.service = 50.0
    assert arrive(ledger, "a", first_waiting=b).service == 500


def test_who_has_waiting_requests_keeps_its_place():
    ledger = TenantLedger({})
    a, b = arrive(ledger, "a", running=False), arrive(ledger, "b", running=False)
    b.charge(100)
    assert arrive(ledger, "a", first_waiting=b) is a
    assert a.service == 0


def test_who_has_running_requests_only_is_lifted_when_it_asks_for_more():
    ledger = TenantLedger({})
    a, b = arrive(ledger, "a"), arrive(ledger, "b", running=False)
    b.charge(100)
    assert arrive(ledger, "a", first_waiting=b) is a
    assert a.service == 100


# Names of tenants come from clients.


def test_only_so_many_absent_tenants_are_remembered():
    ledger = TenantLedger({})

    def come_and_go(start: int, count: int) -> int:
        for index in range(start, start + count):
            leave(ledger, arrive(ledger, f"t{index}"))
        gc.collect()
        return sum(isinstance(thing, Tenant) for thing in gc.get_objects())

    before = come_and_go(0, 0)  # those that other tests' schedulers hold
    assert come_and_go(0, 2 * MAX_ABSENT_TENANTS) - before <= MAX_ABSENT_TENANTS


def test_who_is_present_is_never_forgotten_and_who_owes_most_is_remembered_longest():
    ledger = TenantLedger({})
    present = arrive(ledger, "present")
    debtor = arrive(ledger, "debtor", first_waiting=present)
    debtor.charge(1000)
    leave(ledger, debtor)
    for index in range(2 * MAX_ABSENT_TENANTS):
        leave(ledger, arrive(ledger, f"t{index}", first_waiting=present))
    assert arrive(ledger, "present") is present
    assert arrive(ledger, "debtor", first_waiting=present) is debtor
    assert debtor.service == 1000


def test_a_weight_that_changes_holds_for_service_from_then_on():
    ledger = TenantLedger({"a": 2.0})
    a, b = arrive(ledger, "a"), arrive(ledger, "b")
    a.charge(8)
    ledger.set_weights({"a": 4.0, "c": 5.0})
    a.charge(8)
    assert a.service == 4.0 + 2.0
    assert ledger.share(a, 10) == 8
    c = arrive(ledger, "c")
    assert [ledger.share(tenant, 10) for tenant in (a, b, c)] == [4, 1, 5]
    ledger.set_weights({})
    assert [ledger.share(tenant, 12) for tenant in (a, b, c)] == [4, 4, 4]
    for tenant in (a, b, c):
        leave(ledger, tenant)
    assert ledger.share(arrive(ledger, "a"), 7) == 7
