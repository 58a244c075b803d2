from collections.abc import Collection, Iterable, Sequence

from jaxengine.preemption import goes_first, may_displace, pick_displaced, pick_victim
from jaxengine.request import Request
from jaxengine.sampling_params import SamplingParams
from jaxengine.tenants import Tenant


def make_request(
    name: str,
    tenant: Tenant,
    rank: float,
    *,
    priority: int = 0,
    blocks: Sequence[int] = (),
) -> Request:
    request = Request(
        name, (1,), SamplingParams(max_tokens=9), seed=0, arrival_time_s=0.0, priority=priority
    )
    request.account, request.rank = tenant, (rank, 0)
    request.block_ids = list(blocks)
    return request


def run(tenant: Tenant, ranks: Iterable[float], **fields) -> list[Request]:
    requests = [make_request(f"{tenant.name}{rank}", tenant, rank, **fields) for rank in ranks]
    tenant.num_running += len(requests)
    return requests


def displaced(
    waiting: Request,
    running: Collection[Request],
    *,
    fair_rows: float = 2.0,
    lacks_row: bool = True,
    lacking_blocks: int = 0,
    kept: Collection[Request] = (),
) -> list[str]:
    def share(tenant: Tenant) -> float:
        return fair_rows * tenant.weight

    holders = [block_id for request in running for block_id in request.block_ids]
    chosen = pick_displaced(
        waiting,
        running,
        fair_rows=share,
        num_holders=holders.count,
        lacks_row=lacks_row,
        lacking_blocks=lacking_blocks,
        kept=kept,
    )
    assert not chosen or may_displace(waiting, running, fair_rows=share)
    return [request.request_id for request in chosen]


# When blocks run out.


def test_the_last_by_rank_gives_way():
    running = run(Tenant("a", 1.0), (3, 1, 5, 2))
    assert pick_victim(running).request_id == "a5"


def test_the_tenant_with_the_most_running_gives_way():
    many, few = Tenant("many", 1.0), Tenant("few", 1.0)
    running = run(many, (1, 2, 3)) + run(few, (4, 5))
    assert pick_victim(running).request_id == "many3"


def test_what_a_tenant_runs_counts_by_its_weight():
    heavy, light = Tenant("heavy", 3.0), Tenant("light", 1.0)
    running = run(heavy, (1, 2, 3, 4, 5)) + run(light, (6, 7))  # 5 / 3 and 2 / 1
    assert pick_victim(running).request_id == "light7"


def test_the_eldest_gives_way_only_when_it_is_alone():
    many, few = Tenant("many", 1.0), Tenant("few", 2.0)
    running = run(many, (1,)) + run(few, (2,))
    assert pick_victim(running).request_id == "few2"
    assert pick_victim(running[:1]).request_id == "many1"


# When a waiting request should run instead. Fair are 2 rows for a tenant of weight 1.


def test_nobody_yields_if_nothing_is_lacking():
    flooder, light = Tenant("f", 1.0), Tenant("l", 1.0)
    waiting = make_request("w", light, 9)
    assert displaced(waiting, run(flooder, (1, 2, 3, 4)), lacks_row=False) == []


def test_a_tenant_above_its_share_yields_to_one_below():
    flooder, light = Tenant("f", 1.0), Tenant("l", 1.0)
    assert displaced(make_request("w", light, 9), run(flooder, (1, 2, 3, 4))) == ["f4"]


def test_a_tenant_at_its_share_does_not_yield():
    a, b = Tenant("a", 1.0), Tenant("b", 1.0)
    assert displaced(make_request("w", b, 9), run(a, (1, 2))) == []


def test_a_tenant_at_its_share_displaces_nobody():
    flooder, full = Tenant("f", 1.0), Tenant("l", 1.0)
    running = run(flooder, (1, 2, 3, 4)) + run(full, (5, 6))
    assert displaced(make_request("w", full, 9), running) == []


def test_shares_go_by_weight():
    flooder, heavy = Tenant("f", 1.0), Tenant("h", 1.5)
    running = run(flooder, (1, 2, 3)) + run(heavy, (5, 6))
    assert displaced(make_request("w", heavy, 9), running) == ["f3"]  # the third of 3 rows


def test_with_more_tenants_than_rows_each_may_have_one():
    flooder, light = Tenant("f", 1.0), Tenant("l", 1.0)
    running = run(flooder, (1, 2))
    assert displaced(make_request("w", light, 9), running, fair_rows=0.5) == ["f2"]


def test_with_more_tenants_than_rows_nobody_loses_the_only_one():
    tenants = [Tenant(name, 1.0) for name in "abc"]
    running = [request for rank, tenant in enumerate(tenants) for request in run(tenant, (rank,))]
    assert displaced(make_request("w", Tenant("w", 1.0), 9), running, fair_rows=0.75) == []


def test_two_tenants_do_not_take_from_each_other_in_turns():
    for fair_rows in (0.3, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0):
        for num_own in range(5):
            for num_other in range(1, 5):
                own, other = Tenant("own", 1.0), Tenant("other", 1.0)
                running = run(own, range(10, 10 + num_own)) + run(other, range(num_other))
                waiting = make_request("w", own, 99)
                names = displaced(waiting, running, fair_rows=fair_rows)
                if not names:
                    continue
                assert len(names) == 1, "one row was asked for"
                [victim] = [request for request in running if request.request_id == names[0]]
                running.remove(victim)
                other.num_running -= 1
                own.num_running += 1
                running.append(waiting)
                assert displaced(victim, running, fair_rows=fair_rows) == []


def test_a_lower_priority_yields_within_a_tenant():
    tenant = Tenant("a", 1.0)
    running = run(tenant, (1,)) + run(tenant, (20, 30), priority=2)
    assert displaced(make_request("w", tenant, 9), running) == ["a30"]


def test_the_same_priority_does_not_yield_whatever_the_rank():
    tenant = Tenant("a", 1.0)
    assert displaced(make_request("w", tenant, 9), run(tenant, (1, 20, 30))) == []


def test_a_lower_priority_that_ranks_before_does_not_yield():
    tenant = Tenant("a", 1.0)
    running = run(tenant, (1, 2), priority=5)
    assert displaced(make_request("w", tenant, 9), running) == []


def test_the_eldest_never_yields():
    tenant = Tenant("a", 1.0)
    running = run(tenant, (20, 30), priority=2)
    waiting = make_request("w", tenant, 9)
    assert displaced(waiting, running[:1]) == []
    assert displaced(waiting, running) == ["a30"]


def test_who_must_stay_does_not_yield():
    tenant = Tenant("a", 1.0)
    running = run(tenant, (10, 20, 30), priority=2)
    assert displaced(make_request("w", tenant, 9), running, kept=running[2:]) == ["a20"]
    assert displaced(make_request("w", tenant, 9), running, kept=running[1:]) == []


def test_as_many_yield_as_hold_the_blocks_that_are_lacking():
    tenant = Tenant("a", 1.0)
    running = run(tenant, (1,), blocks=(1, 2, 3))
    for rank, blocks in ((20, (4, 5, 6)), (30, (7,)), (40, (8, 9))):
        running += run(tenant, (rank,), priority=2, blocks=blocks)
    waiting = make_request("w", tenant, 9)

    def lacking(count: int, **fields) -> list[str]:
        return displaced(waiting, running, lacking_blocks=count, **{"lacks_row": False} | fields)

    assert lacking(0) == []
    assert lacking(2) == ["a40"]
    assert lacking(3) == ["a40", "a30"]
    assert lacking(4) == ["a40", "a30", "a20"]
    assert lacking(6) == ["a40", "a30", "a20"]
    assert lacking(7) == []  # not even all of them would do, so nobody yields in vain
    assert lacking(0, lacks_row=True) == ["a40"]


def test_a_shared_block_is_free_when_its_last_holder_yields():
    tenant = Tenant("a", 1.0)
    running = run(tenant, (1,), blocks=(1,))
    running += run(tenant, (20,), priority=2, blocks=(1, 2, 3))
    running += run(tenant, (30,), priority=2, blocks=(1, 2, 4))
    waiting = make_request("w", tenant, 9)
    for count, names in ((1, ["a30"]), (2, ["a30", "a20"]), (3, ["a30", "a20"]), (4, [])):
        assert displaced(waiting, running, lacks_row=False, lacking_blocks=count) == names


def test_a_tenant_gives_blocks_only_down_to_its_share_of_rows():
    flooder, light = Tenant("f", 1.0), Tenant("l", 1.0)
    running = []
    for rank in range(5):
        running += run(flooder, (rank,), blocks=(2 * rank, 2 * rank + 1))
    waiting = make_request("w", light, 9)
    for count, names in ((1, ["f4"]), (6, ["f4", "f3", "f2"]), (7, [])):
        assert displaced(waiting, running, lacks_row=False, lacking_blocks=count) == names


# A look that costs little says whether it is worth to look closer.


def test_where_nobody_can_make_room_a_quick_look_says_so():
    a, b = Tenant("a", 1.0), Tenant("b", 1.0)
    running = run(a, (1, 2)) + run(b, (3, 4))
    for tenant in (a, b):
        waiting = make_request("w", tenant, 9)
        assert not may_displace(waiting, running, fair_rows=lambda _: 2.0)


def test_a_quick_look_finds_a_tenant_above_its_share_and_a_lower_priority():
    flooder, light = Tenant("f", 1.0), Tenant("l", 1.0)
    running = run(flooder, (1, 2, 3))
    assert may_displace(make_request("w", light, 9), running, fair_rows=lambda _: 2.0)
    assert not may_displace(make_request("w", flooder, 9), running, fair_rows=lambda _: 2.0)
    urgent = make_request("w", flooder, 9, priority=-1)
    assert may_displace(urgent, running, fair_rows=lambda _: 2.0)


# Among prompts.


def test_a_waiting_prompt_goes_before_one_of_a_tenant_that_has_had_more_service():
    a, b = Tenant("a", 1.0), Tenant("b", 1.0)
    waiting, begun = make_request("w", a, 9), run(b, (1,))[0]
    a.service, b.service = 5.0, 6.0
    assert goes_first(waiting, begun)
    b.service = 4.0
    assert not goes_first(waiting, begun)
    b.service = 5.0
    assert goes_first(waiting, begun)  # b runs something, a does not
    a.num_running = 1
    assert not goes_first(waiting, begun)


def test_within_a_tenant_a_waiting_prompt_goes_first_only_by_priority():
    tenant = Tenant("t", 1.0)
    [begun] = run(tenant, (9,), priority=1)
    assert goes_first(make_request("w", tenant, 8), begun)
    assert not goes_first(make_request("w", tenant, 8, priority=1), begun)
    assert not goes_first(make_request("w", tenant, 10), begun)
