"""Who may join the queue. Four rows and a queue of ten unless a test says otherwise."""

import pytest

from engine_loop import small_config
from jaxengine.admission import MAX_RETRY_S, MEMORY_S, MIN_RETRY_S, Admission
from jaxengine.errors import QueueFullError
from jaxengine.sampling_params import SamplingParams
from jaxengine.stats import EngineStats
from jaxengine.token_engine import TokenRequest


def make_request(num_tokens: int = 5, *, tenant: str = "", queue_timeout_s=None) -> TokenRequest:
    return TokenRequest(
        prompt_token_ids=(1,) * num_tokens,
        params=SamplingParams(max_tokens=1),
        tenant=tenant,
        queue_timeout_s=queue_timeout_s,
    )


class Door:
    """An admission, what was let in, and the engine's counts as the test sets them."""

    def __init__(self, **changes) -> None:
        config = small_config(**({"max_num_queued_requests": 10} | changes))
        self.admission = Admission(config, EngineStats())
        self.ids: list[str] = []
        self.tokens = 0
        self._num_let_in = 0

    def ask(self, *requests: TokenRequest) -> str:
        """Let all of them in, or say why not."""
        try:
            self.admission.check(requests)
        except QueueFullError as refusal:
            self.refusal = refusal
            return refusal.reason
        for request in requests:
            self._num_let_in += 1
            self.ids.append(f"r{self._num_let_in}")
            self.tokens += len(request.prompt_token_ids)
            self.admission.accept(self.ids[-1], request)
        return ""

    def fill(self, count: int, **fields) -> int:
        """Ask one by one, so many times; return how many came in."""
        return sum(self.ask(make_request(**fields)) == "" for _ in range(count))

    def note(self, now_s: float, **counts) -> None:
        """Let the engine report; it has received all that was let in."""
        counts = {"num_received": self._num_let_in, "tokens_received": self.tokens} | counts
        self.admission.note(EngineStats(**counts), now_s)


# Bounds.


def test_rows_and_queue_are_filled_and_no_more():
    door = Door()
    assert door.fill(20) == 4 + 10
    assert door.ask(make_request()) == "queued_requests"
    assert str(door.refusal) == "14 requests are running or waiting, and at most 10 may wait"


def test_free_rows_do_not_count_as_queue_and_taken_ones_do_not_count_as_free():
    door = Door(max_num_queued_requests=0)
    assert door.fill(9) == 4
    door.note(1.0, num_running=4)
    assert door.fill(9) == 0
    door.admission.end("r1")
    door.note(2.0, num_running=3)
    assert door.fill(9) == 1


def test_while_requests_wait_no_row_counts_as_free():
    # They wait for blocks, so a free row helps nobody.
    door = Door(max_num_queued_requests=2)
    assert door.fill(9) == 6
    door.note(1.0, num_running=2, num_waiting=4)
    door.admission.end("r1")
    door.note(2.0, num_running=1, num_waiting=4)
    assert door.fill(9) == 0
    for name in ("r2", "r3", "r4"):
        door.admission.end(name)
    door.note(3.0, num_running=1, num_waiting=1)
    assert door.fill(9) == 1


def test_a_list_is_let_in_whole_or_not_at_all():
    door = Door()
    assert door.ask(*[make_request()] * 12) == ""
    assert door.ask(*[make_request()] * 3) == "queued_requests"
    assert door.ask(*[make_request()] * 2) == ""
    assert door.ask() == ""


def test_whoever_asks_beforehand_hears_the_same():
    door = Door()
    door.fill(12)
    door.admission.check_count(2, "")
    with pytest.raises(QueueFullError):
        door.admission.check_count(3, "")


def test_prompt_tokens_that_wait_have_a_bound_of_their_own():
    door = Door(max_num_queued_tokens=20)
    assert door.fill(4, num_tokens=50) == 4  # they start at once
    door.note(1.0, num_running=4)
    assert door.ask(make_request(15)) == ""
    assert door.ask(make_request(6)) == "queued_tokens"
    assert str(door.refusal) == "15 prompt tokens wait, 20 may"
    assert door.ask(make_request(5)) == ""
    assert door.ask(make_request(1)) == "queued_tokens"


def test_tokens_are_counted_wherever_their_request_is():
    door = Door(max_num_queued_tokens=20)
    door.fill(4)
    door.note(1.0, num_running=4)
    door.ask(make_request(12))  # in the inbox
    assert door.ask(make_request(9)) == "queued_tokens"
    door.note(2.0, num_running=4, num_waiting=1, num_waiting_tokens=12)  # in the queue
    assert door.ask(make_request(9)) == "queued_tokens"
    assert door.ask(make_request(8)) == ""
    door.admission.end("r1")
    door.note(3.0, num_running=4, num_waiting=1, num_waiting_tokens=8)  # one has started
    assert door.ask(make_request(12)) == ""


def test_a_list_of_many_tokens_is_let_in_if_all_can_start_at_once():
    door = Door(max_num_queued_tokens=20)
    assert door.ask(*[make_request(50)] * 5) == "queued_tokens"
    assert door.ask(*[make_request(50)] * 4) == ""


# How long it will take.


def draining_door(**changes) -> Door:
    """Four run; the queue drained by 5 requests and 100 tokens in 2 seconds, and 10 wait."""
    door = Door(**({"max_num_queued_requests": 100} | changes))
    door.fill(19, num_tokens=20)
    door.note(10.0, num_running=4, num_waiting=15, num_waiting_tokens=300)
    for index in range(5):
        door.admission.end(f"r{index + 1}")
    door.note(
        12.0,
        num_running=4,
        num_waiting=10,
        num_waiting_tokens=200,
        num_admitted=5,
        tokens_admitted=100,
    )
    return door


def test_nothing_is_predicted_before_anything_is_known():
    door = Door()
    door.fill(14)
    assert door.admission.predicted_wait_s("") == 0.0


def test_the_wait_is_the_backlog_over_the_rate_at_which_it_drains():
    door = draining_door(scheduling_policy="fcfs")
    # 10 requests at 2.5 a second; 200 tokens at 50 a second.
    assert door.admission.predicted_wait_s("") == 4.0
    door.ask(make_request(100))
    assert door.admission.predicted_wait_s("") == 6.0  # 300 tokens


def test_a_request_that_would_wait_too_long_is_refused_and_told_when_to_come_back():
    door = draining_door(scheduling_policy="fcfs")
    assert door.ask(make_request(queue_timeout_s=4.5)) == ""
    assert door.ask(make_request(queue_timeout_s=1.5)) == "queue_timeout"
    assert "would wait about 4.4 s" in str(door.refusal)
    assert door.refusal.retry_after_s == pytest.approx(4.4 - 1.5)
    assert door.ask(make_request()) == ""


def test_the_engines_own_timeout_counts_unless_the_request_has_one():
    door = draining_door(scheduling_policy="fcfs", queue_timeout_s=1.0)
    assert door.ask(make_request()) == "queue_timeout"
    assert door.ask(make_request(queue_timeout_s=60.0)) == ""
    assert door.admission.queue_timeout_s(make_request()) == 1.0
    assert door.admission.queue_timeout_s(make_request(queue_timeout_s=60.0)) == 60.0


def test_the_most_impatient_of_a_list_decides():
    door = draining_door(scheduling_policy="fcfs")
    requests = [make_request(queue_timeout_s=timeout_s) for timeout_s in (60.0, 1.0, 60.0)]
    assert door.ask(*requests) == "queue_timeout"


def test_whoever_can_start_at_once_does_not_wait_whatever_the_rates():
    door = draining_door(scheduling_policy="fcfs")
    for name in door.ids[5:]:
        door.admission.end(name)
    door.note(13.0)
    # Four rows are free: the first four start at once, also while they are in the inbox.
    assert door.fill(4, num_tokens=50, queue_timeout_s=0.5) == 4
    assert door.ask(make_request(50, queue_timeout_s=0.5)) == "queue_timeout"


def test_rates_follow_what_happens_and_forget():
    door = draining_door(scheduling_policy="fcfs")
    # In the next 5 seconds 5 requests more, 1 a second.
    door.note(
        17.0,
        num_running=4,
        num_waiting=10,
        num_waiting_tokens=200,
        num_admitted=10,
        tokens_admitted=200,
    )
    # Half of the memory has passed: 1 / sqrt(e) = 0.60653 of what was known remains.
    assert MEMORY_S == 10.0
    assert door.admission.predicted_wait_s("") == pytest.approx(
        10 / (0.60653 * 2.5 + 0.39347 * 1.0), rel=1e-4
    )


def test_a_queue_that_was_empty_says_nothing_about_how_fast_it_drains():
    door = draining_door(scheduling_policy="fcfs")
    door.note(13.0, num_running=4, num_admitted=15, tokens_admitted=300)
    door.note(20.0, num_running=4, num_waiting=10, num_waiting_tokens=200, num_admitted=16)
    assert door.admission.predicted_wait_s("") == 4.0


def test_a_queue_that_stands_still_is_not_taken_for_one_that_nothing_is_known_of():
    door = draining_door(scheduling_policy="fcfs")
    counts = {"num_waiting_tokens": 200, "num_admitted": 5, "tokens_admitted": 100}
    door.note(52.0, num_running=4, num_waiting=10, **counts)
    assert door.admission.predicted_wait_s("") >= 4.0
    assert door.ask(make_request(queue_timeout_s=1.0)) == "queue_timeout"


def test_a_tenant_waits_behind_its_own_requests_only():
    door = draining_door()
    # All are of one tenant. Another has half of 2.5 requests a second, and nobody before it.
    assert door.admission.predicted_wait_s("light") == 0.0
    assert door.fill(3, tenant="light") == 3
    assert door.admission.predicted_wait_s("light") == pytest.approx(3 / 1.25)
    assert door.ask(make_request(queue_timeout_s=1.0)) == "queue_timeout"
    assert door.ask(make_request(queue_timeout_s=3.0, tenant="light")) == ""


# When to come back.


def test_retry_after_is_when_the_excess_has_drained():
    door = draining_door(scheduling_policy="fcfs", max_num_queued_requests=15)
    # 10 wait, 5 more may; of 10 more, 5 are too many: 2 seconds at 2.5 a second.
    assert door.ask(*[make_request()] * 10) == "queued_requests"
    assert door.refusal.retry_after_s == 2.0


def test_retry_after_for_tokens_is_when_the_excess_tokens_have_drained():
    door = draining_door(scheduling_policy="fcfs", max_num_queued_tokens=250)
    assert door.ask(make_request(200)) == "queued_tokens"
    assert door.refusal.retry_after_s == 3.0  # 150 too many, 50 a second


def test_retry_after_is_clamped():
    door = draining_door(scheduling_policy="fcfs", max_num_queued_requests=15)
    assert door.ask(*[make_request()] * 6) == "queued_requests"
    assert door.refusal.retry_after_s == MIN_RETRY_S
    assert door.ask(*[make_request()] * 1000) == "queued_requests"
    assert door.refusal.retry_after_s == MAX_RETRY_S
    door = Door()
    door.fill(14)
    assert door.ask(*[make_request()] * 1000) == "queued_requests"
    assert door.refusal.retry_after_s == MIN_RETRY_S  # nothing is known


# A flooding tenant.


def test_a_tenant_that_floods_the_queue_shuts_out_itself_only():
    door = Door()
    assert door.fill(20, tenant="flooder") == 14
    # Two tenants: each may hold half of 4 rows and 10 places.
    assert door.fill(20, tenant="light") == 7
    assert door.ask(make_request(tenant="flooder")) == "queued_requests"


def test_beyond_the_queue_there_is_a_hard_bound():
    door = Door()
    assert door.fill(20, tenant="flooder") == 14
    num_let_in = 14 + sum(door.fill(1, tenant=f"t{index}") for index in range(100))
    # Twice as many as without: 4 rows and 10 places. Each of the others may hold one place as
    # long as 14 / (number of tenants) is at least one.
    assert num_let_in <= 2 * 14
    assert num_let_in >= 14 + 10


def test_weights_say_how_much_of_a_full_queue_a_tenant_may_hold():
    door = Door(tenant_weights={"heavy": 6.0})
    assert door.fill(20, tenant="flooder") == 14
    assert door.fill(20, tenant="heavy") == 12  # 6 / 7 of 14


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_without_fairness_a_full_queue_is_full_for_all(policy):
    door = Door(scheduling_policy=policy)
    door.fill(20, tenant="flooder")
    assert door.fill(20, tenant="light") == 0


def test_alone_a_tenant_may_not_go_beyond_the_queue():
    door = Door()
    assert door.fill(100, tenant="only") == 14


def test_a_light_tenant_may_go_beyond_the_bound_of_tokens_too():
    door = Door(max_num_queued_tokens=100)
    door.fill(4, tenant="flooder")
    door.note(1.0, num_running=4)
    assert door.fill(9, tenant="flooder", num_tokens=20) == 5
    assert door.ask(make_request(20, tenant="light")) == ""
    assert door.ask(make_request(150, tenant="light")) == "queued_tokens"  # more than twice 100


# Nothing is left.


def test_counts_return_to_zero():
    door = Door(tenant_weights={"a": 0.1, "b": 0.7})
    for round_ in range(50):
        for tenant in ("a", "b", "c", f"t{round_}"):
            assert door.ask(make_request(tenant=tenant)) == ""
        for name in door.ids:
            door.admission.end(name)
        door.ids.clear()
        door.note(float(round_))
    assert door.admission._tenant_of == {}
    assert door.admission._num_present == {}
    assert door.admission._total_weight == pytest.approx(0.0, abs=1e-9)
    assert door.admission._tokens_queued == 0
    assert door.fill(20) == 14


def test_what_left_before_the_engine_saw_it_counts_no_longer():
    door = Door()
    door.fill(14)
    for name in door.ids:
        door.admission.end(name)
    assert door.fill(20) == 14


def test_weights_that_change_hold_from_then_on():
    door = Door()
    assert door.fill(20, tenant="flooder") == 14
    door.admission.set_tenant_weights({"heavy": 6.0})
    assert door.fill(20, tenant="heavy") == 12  # 6 / 7 of 14
