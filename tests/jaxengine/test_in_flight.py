from types import SimpleNamespace

import pytest

from jaxengine.in_flight import LATEST_LOOK_S, SOONEST_LOOK_S, InFlight
from steps import step_of


class Handle:
    """A step that is done when it is said to be."""

    num_slots = 0
    done = False

    def is_done(self):
        return self.done

    def result(self):
        return []

    def logprobs(self):
        return {}


def in_flight_with(*left_s, pause_after_s=None):
    in_flight = InFlight()
    for seconds in left_s:
        in_flight.append(step_of(pause_after_s=pause_after_s))
        in_flight[len(in_flight) - 1].handle = Handle()
        in_flight[len(in_flight) - 1].left_s = seconds
    in_flight.busy_since_s = 10.0
    return in_flight


def test_what_is_left_is_known_if_it_is_of_every_step():
    assert in_flight_with().left_s() == 0.0
    assert in_flight_with(0.5, 0.25).left_s() == 0.75
    assert in_flight_with(0.5, None).left_s() is None


def test_a_step_can_be_put_before_those_that_are_there():
    in_flight = in_flight_with(1.0)
    (behind,) = in_flight
    before = in_flight.put_first(step_of())
    assert list(in_flight) == [before, behind]
    assert in_flight.outputs == (before.output, behind.output)
    in_flight.drop_first()
    assert list(in_flight) == [behind]


def test_a_long_piece_is_paused_so_long_after_streams_have_run():
    in_flight = in_flight_with(1.0, pause_after_s=0.25)
    in_flight.streams_ran_s = 9.5
    assert in_flight.pauses_at_s() == 9.75  # it is time
    in_flight.streams_ran_s = 10.0
    assert in_flight.pauses_at_s() == 10.25
    in_flight[0].left_s = 0.25  # it ends by then
    assert in_flight.pauses_at_s() is None
    in_flight[0].left_s = None
    assert in_flight.pauses_at_s() is None


def test_other_steps_are_not_paused_nor_is_one_behind_which_another_waits():
    assert in_flight_with(1.0).pauses_at_s() is None
    assert in_flight_with(1.0, 1.0, pause_after_s=0.25).pauses_at_s() is None
    assert in_flight_with().pauses_at_s() is None


def test_streams_have_run_when_a_step_of_theirs_ends():
    in_flight = in_flight_with(1.0)
    in_flight.count_busy(12.0)
    in_flight.drop_first()
    assert (in_flight.streams_ran_s, in_flight.busy_s) == (12.0, 2.0)
    in_flight.append(step_of(pause_after_s=0.5))
    in_flight.count_busy(13.0)
    in_flight.drop_first()
    assert (in_flight.streams_ran_s, in_flight.busy_s) == (12.0, 3.0)


@pytest.mark.parametrize(
    ("left_s", "done", "worth"),
    [(1.0, False, True), (1.0, True, False), (0.001, False, False), (None, False, False)],
)
def test_a_long_step_that_is_not_done_is_looked_at(left_s, done, worth):
    in_flight = in_flight_with(left_s)
    in_flight[0].handle.done = done
    assert in_flight.is_worth_looking() == worth


@pytest.mark.parametrize(
    ("now_s", "look_s"), [(10.0, LATEST_LOOK_S), (10.998, 0.001), (11.5, SOONEST_LOOK_S)]
)
def test_the_nearer_the_end_the_sooner_one_looks(now_s, look_s):
    assert in_flight_with(1.0).seconds_to_look(now_s) == pytest.approx(look_s)


@pytest.mark.parametrize(
    ("predicted_s", "overtaken_s", "may"),
    [(0.5, 0.0, True), (0.5, 0.4, True), (0.5, 0.5, False), (None, 0.1, False)],
)
def test_a_step_is_delayed_for_as_long_as_it_takes_itself(predicted_s, overtaken_s, may):
    (step,) = in_flight_with(1.0)
    step.launched = SimpleNamespace(predicted_s=predicted_s)
    assert step.may_be_overtaken()
    step.began_s, step.overtaken_s = 1.0, overtaken_s
    assert step.may_be_overtaken() == may


def test_newcomers_wait_for_the_pauses_of_a_long_piece():
    (step,) = in_flight_with(1.0, pause_after_s=0.1)
    assert not step.may_be_overtaken()
