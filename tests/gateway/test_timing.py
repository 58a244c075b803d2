from itertools import accumulate

import pytest

from gateway.timing import TimeKeeper
from jaxengine.outputs import RequestOutput, RequestTiming


def output(*times_s, queue_s=0.5, num_preemptions=0):
    return RequestOutput(
        request_id="r",
        new_token_ids=(7,) * len(times_s),
        new_token_times_s=times_s,
        queue_s=queue_s,
        num_preemptions=num_preemptions,
    )


def keeper(arrived_s):
    """Return one that tells nobody the latencies."""
    return TimeKeeper(arrived_s, lambda latency_s: None)


def test_without_an_engine_timing_everything_is_measured_from_the_token_times():
    times = keeper(10.0)
    times.add(output(12.0, queue_s=0.25), 1)
    times.add(output(12.5, 14.0, queue_s=0.5, num_preemptions=2), 2)
    timing = times.finish(15.0, None)
    assert timing.queue_s == 0.5
    assert timing.prefill_s == 1.5
    assert timing.ttft_s == 2.0
    assert timing.decode_s == 2.0
    assert timing.e2e_s == 5.0
    assert timing.num_preemptions == 2


def test_inter_token_latencies_are_by_nearest_rank():
    gaps = [4.0, 1.0, 3.0, 2.0]  # sorted 1 2 3 4: rank ceil(0.5*4)=2, ceil(0.99*4)=4
    times = keeper(0.0)
    times.add(output(*accumulate(gaps, initial=0.0)), 5)
    timing = times.finish(10.0, None)
    assert (timing.itl_p50_s, timing.itl_p99_s, timing.itl_max_s) == (2.0, 4.0, 4.0)
    assert timing.itl_mean_s == pytest.approx(2.5)


def test_latencies_are_told_as_they_come_and_only_of_tokens_that_count():
    told = []
    times = TimeKeeper(0.0, told.append)
    times.add(output(1.0), 1)
    assert told == []
    times.add(output(3.0, 3.5, 9.0), 2)
    times.add(output(4.5), 0)
    assert told == [2.0, 0.5]
    times.add(output(4.5), 1)
    assert told == [2.0, 0.5, 1.0]


def test_one_token_has_no_inter_token_latency():
    times = keeper(0.0)
    times.add(output(1.0), 1)
    timing = times.finish(1.0, None)
    assert timing.itl_mean_s is timing.itl_p50_s is timing.itl_p99_s is timing.itl_max_s is None


def test_a_request_that_never_ran_spent_all_its_time_in_the_queue():
    timing = keeper(1.0).finish(4.0, None)
    assert (timing.queue_s, timing.e2e_s, timing.ttft_s) == (3.0, 3.0, None)
    assert timing.prefill_s == timing.decode_s == 0.0


def test_the_timing_of_the_engine_wins():
    engine = RequestTiming(
        queue_s=1.0,
        prefill_s=2.0,
        decode_s=3.0,
        ttft_s=3.0,
        e2e_s=6.0,
        num_cached_tokens=0,
        num_preemptions=1,
    )
    timing = keeper(0.0).finish(99.0, engine)
    assert (timing.queue_s, timing.prefill_s, timing.decode_s) == (1.0, 2.0, 3.0)
    assert (timing.ttft_s, timing.e2e_s, timing.num_preemptions) == (3.0, 6.0, 1)


def test_times_are_told_to_the_microsecond():
    times = keeper(0.0)
    times.add(output(1 / 3, 2 / 3, 1.1, queue_s=0.12345678), 3)
    timing = times.finish(1.23456789, None)
    assert (timing.queue_s, timing.ttft_s, timing.e2e_s) == (0.123457, 0.333333, 1.234568)
    assert (timing.itl_p50_s, timing.itl_max_s) == (0.333333, 0.433333)
