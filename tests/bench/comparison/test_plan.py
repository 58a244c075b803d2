import pytest

from bench.comparison.plan import WORKLOAD_KINDS, PeersPlan, Workload, stream_name


def by_name(plan: PeersPlan, round_number: int = 0) -> dict[str, Workload]:
    return {workload.name: workload for workload in plan.workloads(round_number, "tokens")}


def test_the_default_is_what_the_comparison_is_about():
    workloads = by_name(PeersPlan())
    assert list(workloads) == [
        *("1 stream", "8 streams", "32 streams", "64 streams"),
        *("exponential", "prefix", "prefill", "long-prompt", "open"),
    ]
    for count in (1, 8, 32, 64):
        workload = workloads[stream_name(count)]
        assert workload.concurrency == count
        assert len(workload.requests) == max(3, 2 * count)
        assert {(len(r.prompt), r.output_len) for r in workload.requests} == {(128, 64)}
    lengths = [request.output_len for request in workloads["exponential"].requests]
    assert workloads["exponential"].concurrency == 32
    assert max(lengths) <= 512
    assert len(set(lengths)) > 20
    assert {r.output_len for r in workloads["prefill"].requests} == {1}
    assert workloads["open"].concurrency is None
    assert len(workloads["open"].requests) == 1000
    assert {r.arrival_s for r in workloads["open"].requests} == {0.0}


def test_nine_tenths_of_a_shared_prefix_are_the_same():
    first, second, *_ = by_name(PeersPlan(prefix_len=100))["prefix"].requests
    assert first.prompt[:90] == second.prompt[:90]
    assert first.prompt[90] != second.prompt[90]


def test_the_streams_beside_a_long_prompt_fill_the_context_and_it_comes_last():
    plan = PeersPlan(disturbed_streams=2, input_len=10, long_len=700, exponential_cap=200)
    assert plan.context == 768  # the next multiple of 256
    *streams, long_prompt = by_name(plan)["long-prompt"].requests
    assert [len(request.prompt) for request in streams] == [10, 10]
    assert {request.output_len for request in streams} == {748}
    assert (len(long_prompt.prompt), long_prompt.output_len) == (700, 1)


def test_every_request_fits_the_context():
    plan = PeersPlan()
    for workload in plan.workloads(0, "tokens"):
        for request in workload.requests:
            assert len(request.prompt) + request.output_len <= plan.context


def test_no_prompt_is_sent_twice_over_workloads_rounds_and_the_warm_up():
    plan = PeersPlan(open_streams=20)
    requests = [
        request
        for round_number in range(2)
        for workload in plan.workloads(round_number, "tokens")
        for request in workload.requests
    ]
    requests += plan.warm_up("tokens")
    prompts = {tuple(request.prompt) for request in requests}
    assert len(prompts) == len(requests)


def test_every_side_gets_the_same_requests():
    assert PeersPlan().workloads(1, "tokens") == PeersPlan().workloads(1, "tokens")


def test_who_takes_texts_only_gets_as_many_words():
    (workload,) = PeersPlan(kinds=("streams",), streams=(2,), input_len=5).workloads(0, "text")
    assert [len(request.prompt.split()) for request in workload.requests] == [5] * 4


@pytest.mark.parametrize("kind", WORKLOAD_KINDS)
def test_a_kind_can_be_chosen_alone(kind):
    assert {w.kind for w in PeersPlan(kinds=(kind,)).workloads(0, "tokens")} == {kind}
