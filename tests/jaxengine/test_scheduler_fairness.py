"""Tenants: what each is served of what all are served, and who makes room for whom."""

import gc
from collections import Counter

import pytest

from engine_loop import EngineLoop, small_config
from jaxengine.request import Request, RequestStatus
from jaxengine.sampling_params import SamplingParams
from scheduler_loop import SchedulerLoop, shares


class Tenants:
    """Tenants that always have requests waiting, and the service that each has had."""

    def __init__(self, **changes) -> None:
        self.loop = SchedulerLoop(**({"num_blocks": 65, "max_num_batched_tokens": 64} | changes))
        self.backlogged: dict[str, dict] = {}
        self.served = Counter()
        self._num_added = 0
        self._computed = Counter()

    def keep_backlogged(self, tenant: str, *, prompt: int = 8, max_tokens: int = 8) -> None:
        self.backlogged[tenant] = {"prompt": prompt, "max_tokens": max_tokens}

    def add(self, tenant: str, prompt: int, **fields):
        self._num_added += 1
        ids = [self._num_added] * prompt  # shares no prefix
        return self.loop.add(f"{tenant}{self._num_added}", ids, tenant=tenant, **fields)

    def step(self, count: int = 1) -> None:
        """Step, and count a prompt token as 1 and an output token as 2, each token once."""
        for _ in range(count):
            for tenant, fields in self.backlogged.items():
                while self.num_waiting(tenant) < 3:
                    self.add(tenant, **fields)
            output = self.loop.schedule()
            for item in output.scheduled:
                request = item.request
                end = item.first_position + item.num_new_tokens
                start = max(item.first_position, self._computed[request])
                num_output = max(0, end - max(start, request.num_prompt_tokens))
                self.served[request.tenant] += max(0, end - start) + num_output
                self._computed[request] = max(end, start)
            self.loop.update(output)

    def num_waiting(self, tenant: str) -> int:
        waiting = self.loop.scheduler.roster.waiting
        return sum(request.tenant == tenant for request in waiting)


@pytest.mark.parametrize(
    ("weights", "ratio"), [({}, 1.0), ({"b": 3.0}, 3.0), ({"a": 0.5, "b": 0.75}, 1.5)]
)
def test_backlogged_tenants_are_served_by_weight(weights, ratio):
    tenants = Tenants(tenant_weights=weights)
    tenants.keep_backlogged("a")
    tenants.keep_backlogged("b")
    tenants.step(2000)
    assert tenants.served["b"] / tenants.served["a"] == pytest.approx(ratio, rel=0.02)


def test_service_is_shared_not_requests():
    # Those of a cost 8 + 2 * 3 each, those of b 32 + 2 * 15 (the last token is not computed).
    tenants = Tenants()
    tenants.keep_backlogged("a", prompt=8, max_tokens=4)
    tenants.keep_backlogged("b", prompt=32, max_tokens=16)
    tenants.step(2000)
    assert tenants.served["b"] / tenants.served["a"] == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_without_fairness_tenants_do_not_matter(policy):
    loop = SchedulerLoop(max_num_seqs=1, scheduling_policy=policy, tenant_weights={"b": 100.0})
    for index in range(6):
        loop.add(f"a{index}", 4, tenant="a", max_tokens=1)
    loop.add("b", 4, tenant="b", max_tokens=1)
    order = []
    while loop.scheduler.has_requests:
        order += loop.step()
    assert order == ["a0", "a1", "a2", "a3", "a4", "a5", "b"]


def test_prompts_of_tenants_share_a_step_by_the_service_they_have_had():
    loop = SchedulerLoop(max_num_scheduled_tokens=8)
    loop.add("a", 24, tenant="a", max_tokens=1)
    loop.add("b", 24, tenant="b", max_tokens=1)
    # Always the one with less service; with equal service the one whose prompt has begun.
    expected = [{"a": 8}, {"b": 8}, {"a": 8}, {"b": 8}, {"a": 8}, {"b": 8}]
    assert [loop.step() for _ in expected] == expected


def test_a_short_prompt_of_a_light_tenant_does_not_wait_for_the_long_ones_of_another():
    loop = SchedulerLoop()
    loop.add("a1", 60, tenant="a", max_tokens=1)
    loop.add("a2", 60, tenant="a", max_tokens=1)
    assert loop.step() == {"a1": 16}
    loop.add("b", 10, tenant="b", max_tokens=1)
    assert loop.step() == {"b": 10, "a1": 6}


def test_a_tenant_pays_for_what_is_computed_and_not_for_what_was_cached():
    loop = SchedulerLoop(max_num_batched_tokens=64, tenant_weights={"t": 2.0})
    first = loop.add("a", range(20), tenant="t", max_tokens=3)
    loop.step()
    assert first.account.service == 20 / 2
    loop.add("b", [*range(16), 50, 51, 52], tenant="t", max_tokens=1)
    assert loop.step() == {"a": 1, "b": 3}
    assert first.account.service == (20 + 2 + 3) / 2


# Those who were away, and those who ask for little.


def test_a_tenant_that_was_away_has_not_saved_up_service():
    tenants = Tenants()
    tenants.add("b", 8, max_tokens=8)
    tenants.step(20)
    tenants.keep_backlogged("a")
    tenants.step(1000)
    tenants.keep_backlogged("b")
    tenants.served.clear()
    tenants.step(100)
    assert tenants.served["b"] / tenants.served["a"] == pytest.approx(1.0, rel=0.1)


def test_a_tenant_that_comes_while_all_rows_are_long_at_work_has_not_saved_up_service():
    # Nothing starts while the four requests of a compute 200 tokens each.
    tenants = Tenants(num_blocks=300, max_model_len=512)
    tenants.keep_backlogged("a", max_tokens=400)
    tenants.step(200)
    tenants.keep_backlogged("b", max_tokens=400)
    tenants.served.clear()
    tenants.step(2000)
    assert tenants.served["b"] / tenants.served["a"] == pytest.approx(1.0, rel=0.1)


def test_a_tenant_that_asked_for_little_has_not_saved_up_service():
    tenants = Tenants(num_blocks=300, max_model_len=512)
    tenants.keep_backlogged("a")
    tenants.add("b", 8, max_tokens=480)  # one row all the time, and never more
    tenants.step(400)
    tenants.keep_backlogged("b")
    tenants.served.clear()
    tenants.step(70)
    assert tenants.served["b"] / tenants.served["a"] == pytest.approx(1.0, rel=0.2)


def test_a_tenant_does_not_pay_for_what_it_used_while_nobody_else_came():
    tenants = Tenants()
    tenants.keep_backlogged("a")
    tenants.step(500)
    tenants.backlogged.clear()
    tenants.step(50)
    assert not tenants.loop.scheduler.has_requests
    tenants.keep_backlogged("b")
    tenants.step(5)
    tenants.keep_backlogged("a")
    tenants.served.clear()
    tenants.step(100)
    assert tenants.served["b"] / tenants.served["a"] == pytest.approx(1.0, rel=0.1)


def test_leaving_and_coming_back_does_not_pay_debts():
    tenants = Tenants(max_num_seqs=2)
    tenants.keep_backlogged("b", max_tokens=4)
    for _ in range(200):
        # a asks for one request that costs as much as many of b, again and again.
        if tenants.num_waiting("a") == 0:
            tenants.add("a", 40, max_tokens=20)
        tenants.step()
    assert tenants.served["a"] / tenants.served["b"] == pytest.approx(1.0, rel=0.25)


# Nothing is wasted for fairness.


def test_alone_a_tenant_gets_everything():
    tenants = Tenants(tenant_weights={"a": 0.01, "b": 100.0})
    tenants.add("b", 8, max_tokens=1)
    tenants.step(3)
    tenants.keep_backlogged("a")
    for _ in range(50):
        output = tenants.loop.schedule()
        tenants.loop.update(output)
        tenants.step()
        assert tenants.loop.scheduler.num_running == 4 or tenants.loop.scheduler.num_waiting == 0


@pytest.mark.parametrize("weights", [{}, {"a": 5.0}])
def test_as_many_tokens_are_scheduled_as_in_order_of_arrival(weights):
    """Requests alike, so that only the order differs: every step must be as full."""
    steps = {}
    for policy in ("fair", "fcfs"):
        loop = SchedulerLoop(
            scheduling_policy=policy, tenant_weights=weights, enable_prefix_caching=False
        )
        for index in range(12):
            loop.add(f"{'aab'[index % 3]}{index}", 6, tenant="aab"[index % 3], max_tokens=5)
        totals = []
        while loop.scheduler.has_requests:
            totals.append(sum(loop.step().values()))
        steps[policy] = totals
    assert steps["fair"] == steps["fcfs"]


# Rows.


def flooded_loop(**changes) -> tuple[SchedulerLoop, list]:
    """A flooder holds all four rows and has more waiting."""
    loop = SchedulerLoop(num_blocks=33, **changes)
    requests = [loop.add(f"f{index}", [index] * 4, tenant="f") for index in range(8)]
    loop.step()
    assert loop.scheduler.num_running == 4
    return loop, requests


def test_a_light_tenant_starts_in_the_next_step_although_a_flooder_holds_all_rows():
    loop, requests = flooded_loop()
    loop.add("l", 4, tenant="l")
    output = loop.schedule()
    assert shares(output) == {"f0": 1, "f1": 1, "f2": 1, "l": 4}
    assert output.num_preempted == 1
    assert requests[3].status is RequestStatus.PREEMPTED


def test_a_light_tenant_displaces_no_more_than_its_share():
    loop, requests = flooded_loop()
    for index in range(4):
        loop.add(f"l{index}", [90 + index] * 4, tenant="l")
    assert set(loop.step()) == {"f0", "f1", "l0", "l1"}
    assert set(loop.step()) == {"f0", "f1", "l0", "l1"}
    assert sum(request.num_preemptions for request in requests) == 2


def test_a_heavy_tenant_displaces_up_to_its_larger_share_and_the_eldest_stays():
    loop, requests = flooded_loop(tenant_weights={"h": 7.0})  # 3.5 of 4 rows
    for index in range(4):
        loop.add(f"h{index}", [90 + index] * 4, tenant="h")
    assert set(loop.step()) == {"f0", "h0", "h1", "h2"}
    assert [request.num_preemptions for request in requests[:4]] == [0, 1, 1, 1]


def test_a_displaced_request_resumes_when_there_is_room_and_before_younger_ones_of_its_tenant():
    loop, requests = flooded_loop()
    loop.add("l", 4, tenant="l", max_tokens=1)
    loop.step()
    assert "f3" in loop.step()
    assert requests[4].status is RequestStatus.WAITING


@pytest.mark.parametrize("overlap", [False, True])
def test_a_displaced_request_ends_with_the_same_tokens(overlap):
    loop = EngineLoop(small_config(overlap=overlap, num_blocks=33))
    for index in range(6):
        loop.add(f"f{index}", range(index, index + 9), tenant="f", max_tokens=20)
    for index in range(12):
        loop.step()
        loop.step()
        loop.add(f"l{index}", range(index, index + 5), tenant=f"l{index % 3}", max_tokens=3)
    loop.run()
    assert loop.stats.num_preemptions > 0
    loop.check_answers()
    loop.check_idle()


def test_each_displacement_lets_another_request_start():
    """Two tenants with more than enough to do do not throw each other out in turns."""
    loop = SchedulerLoop(num_blocks=65)
    requests = []
    for index in range(40):
        tenant = "ab"[index % 2]
        requests.append(
            loop.add(
                f"{tenant}{index}",
                [index] * (4 if tenant == "a" else 30),
                tenant=tenant,
                max_tokens=20 if tenant == "a" else 2,
            )
        )
    while loop.scheduler.has_requests:
        loop.step()
    num_preemptions = {
        tenant: sum(r.num_preemptions for r in requests if r.tenant == tenant) for tenant in "ab"
    }
    assert num_preemptions["a"] <= 20
    assert num_preemptions["b"] == 0


def test_more_tenants_than_rows_take_turns_without_throwing_each_other_out():
    loop = SchedulerLoop(num_blocks=65)
    requests = [
        loop.add(f"{name}{index}", [index] * 4, tenant=name, max_tokens=6)
        for index in range(3)
        for name in "abcdefgh"
    ]
    firsts: list[str] = []
    while loop.scheduler.has_requests:
        firsts += [name for name, count in loop.step().items() if count == 4]
    assert sum(request.num_preemptions for request in requests) == 0
    assert [name[0] for name in firsts[:8]] == list("abcdefgh")


# Many names.


def test_names_that_are_made_up_do_not_pile_up():
    loop = SchedulerLoop()
    params = SamplingParams(max_tokens=2)

    def come_and_go(start: int, count: int) -> int:
        for index in range(start, start + count):
            name = f"r{index}"
            loop.scheduler.add(
                Request(name, (1,), params, seed=0, arrival_time_s=0.0, tenant=f"t{index}")
            )
            loop.scheduler.abort(name, 0.0)
        gc.collect()
        return len(gc.get_objects())

    most = come_and_go(0, 12_000)  # more than are remembered
    assert come_and_go(12_000, 24_000) <= most + 6000  # half of them are forgotten at a time
