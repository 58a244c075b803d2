import pytest

from bench.policy_plan import PolicyPlan, Workload


def make_plan(**fields: object) -> PolicyPlan:
    sizes = {"batch_size": 4, "num_batches": 3, "output_mean": 8, "output_cap": 40}
    return PolicyPlan(**{**sizes, "input_min": 3, "input_max": 9, **fields})


def test_the_burst_of_some_lengths_comes_before_their_poisson_arrivals():
    plan = make_plan(lengths=("exponential", "uniform"), arrivals=("poisson", "burst"))
    assert [workload.name for workload in plan.workloads()] == [
        "exponential, burst",
        "exponential, Poisson",
        "uniform, burst",
        "uniform, Poisson",
    ]
    assert next(plan.workloads()) == Workload(lengths="exponential", arrivals="burst")


def test_a_workload_is_the_same_each_time_and_fills_every_batch():
    plan = make_plan()
    requests = plan.requests("exponential", rate=2.0, part=1)
    assert requests == plan.requests("exponential", rate=2.0, part=1)
    assert len(requests) == 12
    assert [request.output_len for request in requests] == plan.output_lens("exponential")
    assert all(3 <= len(request.prompt) <= 9 for request in requests)


def test_arrivals_are_all_at_once_or_spread_by_their_rate():
    plan = make_plan()
    assert {request.arrival_s for request in plan.requests("uniform", rate=None, part=1)} == {0.0}
    slow = plan.requests("uniform", rate=1.0, part=1)
    fast = plan.requests("uniform", rate=4.0, part=1)
    assert [request.arrival_s for request in slow] == pytest.approx(
        [4 * request.arrival_s for request in fast]
    )


def test_another_part_has_other_prompts_of_the_same_lengths():
    plan = make_plan()
    first = plan.requests("uniform", rate=None, part=1)
    second = plan.requests("uniform", rate=None, part=2)
    assert not {tuple(r.prompt) for r in first} & {tuple(r.prompt) for r in second}
    assert [len(r.prompt) for r in first] == [len(r.prompt) for r in second]


def test_a_longer_probe_begins_with_the_same_lengths():
    plan = make_plan()
    longer = plan.requests("exponential", rate=1.0, part=1, count=20)
    assert [request.output_len for request in longer][:12] == plan.output_lens("exponential")


def test_a_warm_up_is_one_full_batch():
    assert [request.output_len for request in make_plan().warmup(0)] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("rate", "seconds", "expected"), [(0.1, 10, 8), (2.0, 10, 20), (2.1, 10, 24)]
)
def test_a_probe_is_long_enough_in_time_and_in_full_batches(
    rate: float, seconds: float, expected: int
):
    assert make_plan().probe_count(rate, seconds, min_batches=2) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 0}, "must be positive"),
        ({"input_min": 9, "input_max": 3}, "self.input_max=3"),
        ({"output_mean": 50}, "at most self.cap=40"),
        ({"arrivals": ("poisson",)}, "need a request rate"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(fields: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_plan(**fields)
