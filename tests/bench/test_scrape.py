import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from bench.scrape import EngineCounters, parse_counters, parse_samples
from gateway.metrics import Metrics
from jaxengine.stats import EngineStats

TEXT = """\
# HELP headrace_engine_busy_seconds_total Time with a step in flight.
# TYPE headrace_engine_busy_seconds_total counter
headrace_engine_busy_seconds_total{model_name="m"} 12.5
headrace_engine_steps_total{model_name="m"} 100.0
headrace_iteration_tokens_sum{model_name="m"} 600.0
headrace_iteration_tokens_bucket{le="+Inf",model_name="m"} 100.0
headrace_wasted_slots_total{cause="bucket",model_name="m"} 100.0
headrace_wasted_slots_total{cause="finished_row",model_name="m"} 300.0
headrace_preemptions_total{model_name="m"} 2.0
headrace_draft_tokens_total{model_name="m"} 50.0
headrace_accepted_draft_tokens_total{model_name="m"} 40.0
headrace_num_requests_running{model_name="m"} 3.0
headrace_num_requests_waiting{model_name="m",reason="seqs"} 1.0
headrace_num_requests_waiting{model_name="m",reason="tokens"} 4.0
"""


def test_counters_are_read_by_name_and_cause():
    assert parse_counters(TEXT) == EngineCounters(
        busy_s=12.5,
        steps=100,
        step_tokens=600,
        wasted_slots={"bucket": 100, "finished_row": 300},
        preemptions=2,
        draft_tokens=50,
        accepted_draft_tokens=40,
        num_unfinished=8,
    )


def test_wasted_slots_are_shares_of_all_slots():
    assert parse_counters(TEXT).wasted_shares() == {"bucket": 0.1, "finished_row": 0.3}
    assert EngineCounters(wasted_slots={"bucket": 0}).wasted_shares() == {}


def test_what_happened_between_two_readings_is_their_difference():
    later = EngineCounters(
        busy_s=14.0, steps=110, wasted_slots={"bucket": 130, "prompt_padding": 5}, num_unfinished=1
    )
    difference = later.since(parse_counters(TEXT))
    assert (difference.busy_s, difference.steps, difference.num_unfinished) == (1.5, 10, 1)
    assert difference.wasted_slots == {"bucket": 30, "prompt_padding": 5}


def test_a_server_that_exports_none_of_it_has_zeros():
    assert parse_counters("") == EngineCounters()
    assert parse_counters("<html>\n # nothing\nother_total 3\n") == EngineCounters()


def test_padding_without_causes_is_the_waste_of_buckets():
    assert parse_counters("headrace_padded_tokens_total 7\n").wasted_slots == {"bucket": 7}


def test_samples_with_odd_labels_are_read_as_prometheus_wrote_them():
    registry = CollectorRegistry()
    counter = Counter("odd", "help", ["a", "b"], registry=registry)
    counter.labels(a='quote " and, comma', b="brace } space").inc(2.5)
    samples = list(parse_samples(generate_latest(registry).decode()))
    (value,) = [value for name, _, value in samples if name == "odd_total"]
    assert value == 2.5
    (labels,) = [labels for name, labels, _ in samples if name == "odd_total"]
    assert labels["b"] == "brace } space"


def test_what_the_gateway_exports_is_found():
    metrics = Metrics("m")
    stats = EngineStats(
        step_busy_s=3.5, num_steps=7, iteration_tokens_sum=90, padded_tokens=10, num_running=2
    )
    metrics.watch_engine(lambda: stats)
    counters = parse_counters(metrics.render()[0].decode())
    assert (counters.busy_s, counters.steps, counters.num_unfinished) == (3.5, 7, 2)
    assert counters.wasted_shares()["bucket"] == pytest.approx(0.1)
