import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import Metrics
from gateway.timing import Timing
from jaxengine.stats import EngineStats

VLLM_SERIES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:iteration_tokens_total_bucket",
}

STATS = EngineStats(
    num_running=2,
    num_waiting=3,
    num_blocks=10,
    num_free_blocks=4,
    num_preempted=1,
    num_waiting_tokens=70,
    waiting_for="kv_cache",
    num_received=12,
    tokens_received=120,
    num_admitted=9,
    tokens_admitted=90,
    num_preemptions=5,
    num_steps_overtaken=6,
    draft_tokens=60,
    accepted_draft_tokens=45,
    compiles_after_ready=0,
    num_steps=7,
    step_times=(1, 0, 2, *[0] * 16, 3, 1),
    step_time_sum_s=9.5,
    num_predicted_steps=6,
    step_prediction_error_s=0.25,
    padded_tokens=30,
    wasted_prompt_slots=20,
    wasted_row_slots=10,
    iteration_tokens=(1, 2, *[0] * 13, 4),
    iteration_tokens_sum=99,
)


def observed(prefix="headrace"):
    metrics = Metrics("m", prefix=prefix)
    metrics.watch_engine(lambda: STATS)
    metrics.observe_inter_token_latency(0.0004)
    metrics.observe_request(
        "stop",
        prompt_tokens=7,
        completion_tokens=5,
        timing=Timing(
            queue_s=1.0,
            prefill_s=2.0,
            decode_s=4.0,
            ttft_s=3.0,
            e2e_s=7.0,
            itl_mean_s=1.0,
            itl_p50_s=1.0,
            itl_p99_s=1.0,
            itl_max_s=1.0,
            num_preemptions=0,
        ),
    )
    return metrics


def samples(metrics):
    text = metrics.render()[0].decode()
    return [s for family in text_string_to_metric_families(text) for s in family.samples]


def value(metrics, name, **labels):
    [found] = [
        s.value for s in samples(metrics) if s.name == name and labels.items() <= s.labels.items()
    ]
    return found


def test_a_request_is_seen_in_every_histogram():
    metrics = observed()
    for name, total in {
        "time_to_first_token_seconds": 3,
        "request_time_per_output_token_seconds": 1,  # 4 s over the 4 tokens after the first
        "e2e_request_latency_seconds": 7,
        "request_queue_time_seconds": 1,
        "request_prefill_time_seconds": 2,
        "request_decode_time_seconds": 4,
        "request_prompt_tokens": 7,
        "request_generation_tokens": 5,
    }.items():
        assert value(metrics, f"headrace_{name}_sum") == total
        assert value(metrics, f"headrace_{name}_count") == 1
    assert value(metrics, "headrace_requests_finished_total", finished_reason="stop") == 1


def test_latency_buckets_start_at_half_a_millisecond():
    metrics = observed()
    assert value(metrics, "headrace_inter_token_latency_seconds_bucket", le="0.0005") == 1


def test_the_engine_is_read_at_each_scrape():
    metrics = observed()
    assert value(metrics, "headrace_num_requests_running") == 2
    assert value(metrics, "headrace_num_requests_waiting") == 3
    assert value(metrics, "headrace_kv_cache_usage_ratio") == 0.6
    assert value(metrics, "headrace_preemptions_total") == 5
    assert value(metrics, "headrace_steps_overtaken_total") == 6
    assert value(metrics, "headrace_draft_tokens_total") == 60
    assert value(metrics, "headrace_accepted_draft_tokens_total") == 45
    assert value(metrics, "headrace_compiles_after_ready") == 0


def test_tokens_per_step_are_a_cumulative_histogram():
    metrics = observed()
    name = "headrace_iteration_tokens"
    assert value(metrics, f"{name}_bucket", le="1.0") == 1
    assert value(metrics, f"{name}_bucket", le="2.0") == 3
    assert value(metrics, f"{name}_bucket", le="16384.0") == 3
    assert value(metrics, f"{name}_bucket", le="+Inf") == 7
    assert (value(metrics, f"{name}_count"), value(metrics, f"{name}_sum")) == (7, 99)


def test_step_times_are_a_cumulative_histogram_in_seconds():
    metrics = observed()
    name = "headrace_step_time_seconds"
    assert value(metrics, f"{name}_bucket", le="0.001") == 1
    assert value(metrics, f"{name}_bucket", le="0.002") == 1
    assert value(metrics, f"{name}_bucket", le="0.003") == 3
    assert value(metrics, f"{name}_bucket", le="5.0") == 6
    assert value(metrics, f"{name}_bucket", le="+Inf") == 7
    assert (value(metrics, f"{name}_count"), value(metrics, f"{name}_sum")) == (7, 9.5)


def test_predictions_of_step_times_are_judged():
    metrics = observed()
    assert value(metrics, "headrace_step_predictions_total") == 6
    assert value(metrics, "headrace_step_prediction_error_seconds_total") == 0.25


@pytest.mark.parametrize(
    ("cause", "count"), [("bucket", 30), ("prompt_padding", 20), ("finished_row", 10)]
)
def test_wasted_slots_have_a_cause(cause, count):
    assert value(observed(), "headrace_wasted_slots_total", cause=cause) == count


def waiting(metrics):
    name = "headrace_num_requests_waiting_by_reason"
    return {s.labels["reason"]: s.value for s in samples(metrics) if s.name == name}


def test_all_that_wait_wait_for_something():
    metrics = observed()
    assert waiting(metrics) == {
        "seqs": 0,
        "kv_cache": 2,
        "tokens": 0,
        "batch": 0,
        "preemption": 0,
        "arrival": 0,
        "preempted": 1,
    }
    assert value(metrics, "headrace_num_waiting_tokens") == 70


def test_requests_that_no_step_has_looked_at_have_just_arrived():
    metrics = Metrics("m")
    metrics.watch_engine(lambda: EngineStats(num_waiting=4))
    assert {reason for reason, count in waiting(metrics).items() if count} == {"arrival"}


def test_what_came_and_what_has_started_are_counted():
    metrics = observed()
    assert value(metrics, "headrace_requests_received_total") == 12
    assert value(metrics, "headrace_requests_admitted_total") == 9
    assert value(metrics, "headrace_prompt_tokens_received_total") == 120
    assert value(metrics, "headrace_prompt_tokens_admitted_total") == 90


def test_a_request_without_a_token_has_no_time_to_first_token():
    metrics = Metrics("m")
    metrics.observe_request(
        "abort",
        prompt_tokens=1,
        completion_tokens=0,
        timing=Timing(
            queue_s=1.0,
            prefill_s=0.0,
            decode_s=0.0,
            ttft_s=None,
            e2e_s=1.0,
            itl_mean_s=None,
            itl_p50_s=None,
            itl_p99_s=None,
            itl_max_s=None,
            num_preemptions=0,
        ),
    )
    assert value(metrics, "headrace_time_to_first_token_seconds_count") == 0
    assert value(metrics, "headrace_request_queue_time_seconds_count") == 1


def test_vllm_names_are_exported_only_when_asked_for():
    assert not any(s.name.startswith("vllm:") for s in samples(observed()))


def test_vllm_names_carry_the_same_numbers_and_vllm_labels():
    metrics = observed("vllm")
    names = {s.name for s in samples(metrics)}
    assert names >= VLLM_SERIES
    assert any(name.startswith("headrace_") for name in names)
    assert value(metrics, "vllm:kv_cache_usage_perc", model_name="m", engine="0") == 0.6
    assert value(metrics, "vllm:time_to_first_token_seconds_sum", model_name="m") == 3
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(metrics, "vllm:iteration_tokens_total_bucket", le="2.0") == 3


def test_routers_find_the_sizes_of_the_kv_cache_in_the_labels_of_vllm():
    metrics = Metrics("m", prefix="vllm")
    metrics.watch_engine(lambda: EngineStats(num_blocks=120, block_size=16))
    labels = {"num_gpu_blocks": "120", "block_size": "16", "engine": "0", "model_name": "m"}
    assert value(metrics, "vllm:cache_config_info", **labels) == 1


def test_two_gateways_in_one_process_do_not_mix():
    first, second = Metrics("a"), Metrics("b")
    first.count_rejection("overloaded")
    assert value(first, "headrace_requests_rejected_total", reason="overloaded") == 1
    assert not [s for s in samples(second) if s.name == "headrace_requests_rejected_total"]


async def test_the_endpoint_answers_in_the_format_that_is_asked_for(gateway):
    async with gateway.session.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert "headrace_num_requests_running" in await response.text()
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    async with gateway.session.get("/metrics", headers=accept) as response:
        assert response.headers["Content-Type"].startswith("application/openmetrics-text")
        assert (await response.text()).endswith("# EOF\n")
