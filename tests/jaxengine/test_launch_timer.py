import random

import pytest

from jaxengine.launch_timer import FIRST_MOMENT, LATE_SHARE, RATE, LaunchTimer


def test_the_host_begins_when_its_share_of_the_running_step_has_passed():
    timer = LaunchTimer()
    assert timer.moment == FIRST_MOMENT == 0.5
    assert timer.begins_at_s(10.0, 0.040) == pytest.approx(10.020)


def test_a_launch_in_time_moves_the_moment_a_little_and_a_late_one_far_back():
    timer = LaunchTimer()
    timer.note(was_late=False)
    assert timer.moment == pytest.approx(0.5 + 0.02 * 0.05)
    timer.note(was_late=True)
    assert timer.moment == pytest.approx(0.5 + 0.02 * 0.05 - 0.02 * 0.95)


@pytest.mark.parametrize("was_late", [False, True])
def test_the_moment_stays_within_the_step(was_late):
    timer = LaunchTimer()
    for _ in range(2000):
        timer.note(was_late=was_late)
    assert timer.moment == (0.0 if was_late else 1.0)


@pytest.mark.parametrize("host_s", [0.001, 0.004])
@pytest.mark.parametrize("deviation", [0.02, 0.2])
def test_one_launch_in_twenty_is_late_whatever_the_steps_look_like(host_s, deviation):
    rng = random.Random(0)
    timer = LaunchTimer()
    num_late = 0
    for number in range(30_000):
        took_s = 0.030 * rng.lognormvariate(0, deviation)
        was_late = timer.begins_at_s(0.0, 0.030) + host_s > took_s
        timer.note(was_late=was_late)
        num_late += was_late and number >= 10_000
    # The moment moves by RATE x LATE_SHARE in between, so the share in the long run is exact.
    assert num_late / 20_000 == pytest.approx(LATE_SHARE, abs=1 / (20_000 * RATE) + 0.002)
