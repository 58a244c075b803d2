from array import array

import pytest

from bench.stream import RequestRecord
from bench.summary import Distribution, Goodput, LoadLevel, percentile, summarize


def make_record(index: int = 0, **fields: object) -> RequestRecord:
    record = RequestRecord(
        index=index,
        start_s=10.0,
        first_token_s=0.5,
        last_token_s=1.5,
        end_s=1.75,
        gaps_s=array("d", [0.5, 0.5]),
        gap_tokens=array("L", [1, 3]),
        first_tokens=1,
        method="usage",
        prompt_tokens=20,
        cached_tokens=0,
        output_tokens=5,
        finish_reason="length",
    )
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def test_percentiles_interpolate_as_the_usual_definition_says():
    # Hand-computed: positions 0.9 * 3 = 2.7 and 0.5 * 3 = 1.5 in [1, 2, 3, 4].
    assert percentile([1, 2, 3, 4], 0.9) == pytest.approx(3.7)
    assert percentile([1, 2, 3, 4], 0.5) == 2.5
    assert percentile([7], 0.99) == 7
    assert percentile([1, 2, 3, 4], 1.0) == 4


def test_a_distribution_is_in_milliseconds_and_none_without_values():
    distribution = Distribution.of_seconds([0.003, 0.001, 0.002])
    assert distribution is not None
    assert (distribution.mean, distribution.p50, distribution.max) == pytest.approx((2, 2, 3))
    assert Distribution.of_seconds([]) is None


def test_rates_count_from_the_first_start_to_the_last_end():
    records = [make_record(0), make_record(1, start_s=12.25)]
    summary = summarize(LoadLevel(concurrency=2), records, output_len=5, client_cpu_s=0.4)
    assert summary.duration_s == 4.0  # from 10.0 to 12.25 + 1.75
    assert summary.output_tokens_per_s == 10 / 4
    assert summary.total_tokens_per_s == 50 / 4
    assert summary.requests_per_s == 0.5
    assert summary.client_cpu_share == pytest.approx(0.1)
    assert summary.client_lag_ms is None


def test_a_gap_that_brought_three_tokens_counts_as_three_thirds():
    summary = summarize(LoadLevel(concurrency=1), [make_record()], output_len=5, client_cpu_s=0)
    assert summary.itl_ms is not None
    assert summary.itl_ms.mean == pytest.approx((500 + 3 * 500 / 3) / 4)
    assert summary.itl_ms.max == pytest.approx(500)
    assert summary.chunk_gap_ms is not None
    assert summary.chunk_gap_ms.mean == pytest.approx(500)
    assert summary.tpot_ms is not None
    assert summary.tpot_ms.mean == pytest.approx(1000 / 4)  # one second for four more tokens
    assert summary.tokens_per_chunk == pytest.approx(5 / 3)
    assert summary.token_count_method == "usage"


def test_failures_are_counted_by_kind_and_leave_the_latencies_alone():
    failed = [
        make_record(1, error="http 429", error_detail="http 429: busy", end_s=0.01),
        make_record(2, error="http 429", error_detail="http 429: busy", end_s=0.01),
        make_record(3, error="timeout", error_detail="timeout", end_s=9.0),
    ]
    records = [make_record(0), *failed]
    summary = summarize(LoadLevel(concurrency=4), records, output_len=5, client_cpu_s=0)
    assert (summary.num_requests, summary.num_failed) == (4, 3)
    assert summary.errors == {"http 429": 2, "timeout": 1}
    assert summary.error_example == "http 429: busy"
    assert summary.output_tokens == 5
    assert summary.duration_s == 9.0
    assert summary.e2e_ms is not None
    assert summary.e2e_ms.max == 1750


def test_a_level_where_all_failed_has_no_latencies_and_does_not_crash():
    records = [make_record(0, error="no connection", error_detail="refused", end_s=0.0)]
    summary = summarize(LoadLevel(concurrency=1), records, output_len=5, client_cpu_s=0)
    assert summary.ttft_ms is None
    assert summary.output_tokens_per_s == 0
    assert summary.tokens_per_chunk is None


def test_answers_of_another_length_are_counted():
    records = [make_record(0), make_record(1, output_tokens=3)]
    summary = summarize(LoadLevel(concurrency=1), records, output_len=5, client_cpu_s=0)
    assert summary.short_outputs == 1


def test_answers_of_mixed_lengths_are_checked_by_who_sent_them():
    records = [make_record(0), make_record(1, output_tokens=3)]
    summary = summarize(LoadLevel(), records, output_len=None, client_cpu_s=0)
    assert summary.short_outputs == 0
    assert summary.level.name == "burst"


def test_totals_are_unknown_when_the_server_does_not_tell():
    records = [make_record(0), make_record(1, prompt_tokens=None)]
    summary = summarize(LoadLevel(concurrency=1), records, output_len=5, client_cpu_s=0)
    assert summary.prompt_tokens is None
    assert summary.total_tokens_per_s is None


def test_the_least_exact_way_of_counting_is_named():
    records = [make_record(0), make_record(1, method="chunks")]
    summary = summarize(LoadLevel(concurrency=1), records, output_len=5, client_cpu_s=0)
    assert summary.token_count_method == "chunks"


def test_an_open_loop_reports_how_late_the_client_was():
    records = [make_record(0, lag_s=0.002)]
    summary = summarize(LoadLevel(request_rate=3.0), records, output_len=5, client_cpu_s=0)
    assert summary.client_lag_ms is not None
    assert summary.client_lag_ms.max == 2
    assert summary.level.name == "3 req/s"


def test_goodput_counts_requests_that_kept_every_demand():
    demand = Goodput.parse("ttft:500,itl:250")  # the record has 500 and 1000 / 4
    records = [
        make_record(0),
        make_record(1, first_token_s=0.6),
        make_record(2, gap_tokens=array("L", [1, 2])),
        make_record(3, error="cut off"),
    ]
    assert [demand.holds(record) for record in records] == [True, False, False, False]
    summary = summarize(
        LoadLevel(concurrency=1), records, output_len=5, client_cpu_s=0, goodput=demand
    )
    assert summary.goodput_per_s == pytest.approx(1 / 1.75)


def test_end_to_end_demands_are_kept_too():
    assert Goodput.parse("e2e:1750").holds(make_record())
    assert not Goodput.parse("e2e:1749").holds(make_record())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("latency:5", "must be ttft:MS, itl:MS or e2e:MS"),
        ("ttft", "no number"),
        ("itl:x", "no num"),
    ],
)
def test_a_demand_that_cannot_be_read_is_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        Goodput.parse(text)
