import pytest

from bench.simulation.device import FixedDevice
from bench.simulation.fleet import Fleet
from bench.simulation.validation import compare, trace_from_steps
from recorded_steps import recorded
from simulated import small_config

# Two requests by hand, a second a step: "a" has 6 prompt tokens and 3 of output; "b" finds 8 of
# its 10 prompt tokens in the cache, arrives during the first step, and has 2 of output.
STEPS = [
    recorded(0, 5.0, 6.0, [("a", 0, 6, True)]),
    recorded(1, 6.0, 7.0, [("a", 6, 1, True), ("b", 8, 2, True)]),
    recorded(2, 7.0, 8.0, [("a", 7, 1, True), ("b", 10, 1, True)]),
]


def fleet(seconds: float = 1.0) -> Fleet:
    return Fleet(config=small_config(), device=FixedDevice(seconds=seconds))


def test_requests_are_read_off_the_steps():
    trace = trace_from_steps(STEPS)
    assert trace.arrival_s.tolist() == [0.0, 1.0]
    assert trace.prompt_len.tolist() == [6, 10]
    assert trace.prefix_len.tolist() == [0, 8]
    assert trace.output_len.tolist() == [3, 2]


def test_a_request_that_began_before_the_recording_is_left_out():
    trace = trace_from_steps(STEPS[1:])
    assert trace.prompt_len.tolist() == [10]


def test_a_recording_without_a_beginning_is_refused():
    with pytest.raises(ValueError, match="no request begins"):
        trace_from_steps([recorded(3, 0.0, 1.0, [("a", 9, 1, True)])])


def test_a_chunked_prompt_ends_where_its_first_token_is_sampled():
    steps = [
        recorded(0, 0.0, 1.0, [("a", 0, 6, False)]),
        recorded(1, 1.0, 2.0, [("a", 6, 3, True)]),
    ]
    assert trace_from_steps(steps).prompt_len.tolist() == [9]


def test_a_device_that_is_right_foretells_the_run():
    result = compare(STEPS, fleet())
    assert result.measured == result.simulated
    assert result.measured.duration_s == 3.0
    assert result.measured.output_tokens_per_s == pytest.approx(5 / 3)
    assert result.measured.mean_itl_ms == 1000
    assert result.throughput_error == pytest.approx(0.0)
    assert result.holds


def test_a_device_that_is_wrong_does_not():
    result = compare(STEPS, fleet(seconds=2.0))
    assert result.throughput_error < -0.15
    assert not result.holds
    assert result.as_dict()["holds"] is False


def test_a_closed_loop_sends_the_next_when_one_has_ended():
    # "b" starts at 3 only: 5 steps in all.
    result = compare(STEPS, fleet(), concurrency=1)
    assert result.simulated.duration_s == 5.0
    assert result.concurrency == 1
