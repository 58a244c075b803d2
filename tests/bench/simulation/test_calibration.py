import random

import numpy as np
import pytest

from bench.simulation.calibration import calibrate
from bench.simulation.device import StepLoad
from recorded_steps import recorded

# The device that is to be found again.
BASES = {(True, 8): 0.010, (True, 16): 0.015, (False, 64): 0.050}
DECODE_S, PREFILL_S = 2e-6, 5e-7


def true_s(decode_only: bool, num_slots: int, decode_context: int, prefill_context: int) -> float:
    return BASES[decode_only, num_slots] + DECODE_S * decode_context + PREFILL_S * prefill_context


def make_steps(count: int = 300, *, noise: float = 0.0, gap_s: float = 0.0):
    source = random.Random(0)
    steps, now_s = [], 0.0
    for index in range(count):
        decode_only, num_slots = source.choice(list(BASES))
        contexts = [source.randrange(10, 1000) for _ in range(source.randrange(1, 8))]
        shares = [(f"r{n}", context - 1, 1, True) for n, context in enumerate(contexts)]
        prefill_context = 0
        if not decode_only:
            length = source.randrange(2, 50)
            shares.append(("p", 0, length, True))
            prefill_context = length * (length + 1) // 2
        step_s = true_s(decode_only, num_slots, sum(contexts), prefill_context)
        step_s *= 1 + noise * source.uniform(-1, 1)
        start_s = now_s + gap_s
        steps.append(
            recorded(
                index,
                start_s,
                start_s + step_s,
                shares,
                num_slots=num_slots,
                scheduled_s=max(0.0, now_s - 0.001),
            )
        )
        now_s = start_s + step_s
    return steps


def test_a_device_that_is_linear_is_found_again():
    device = calibrate(make_steps())
    assert device.base_s == pytest.approx(BASES, rel=1e-6)
    assert device.decode_context_s == pytest.approx(DECODE_S, rel=1e-6)
    assert device.prefill_context_s == pytest.approx(PREFILL_S, rel=1e-5)
    assert device.fit_error < 1e-9
    assert device.gap_s == pytest.approx(0.0, abs=1e-12)
    load = StepLoad(16, True, 3, 500, 0)
    assert device.step_s(load) == pytest.approx(true_s(True, 16, 500, 0))


def test_a_device_that_leaves_out_padding_goes_by_tokens():
    """Straight from 1 to 16 and from there to 32 tokens, whatever they belong to."""
    base_s = {1: 0.010, 16: 0.012, 32: 0.020}
    steps = [
        recorded(
            n,
            n,
            n + np.interp(size, list(base_s), list(base_s.values())) + 1e-6 * 100 * (n % 3 + 1),
            [("p", 0, 2, True)] * (n % 2)
            + [("d", 100 * (n % 3 + 1) - 1, 1, True)]
            + [("x", 0, 1, True)] * (size - 1 - 2 * (n % 2)),
            num_slots=size,
        )
        for n, size in enumerate([1, 3, 8, 11, 16, 17, 20, 25, 32, 5, 12, 31] * 4)
        if size > 2 * (n % 2)
    ]
    device = calibrate(steps)
    for size in (3, 11, 25):
        expected_s = np.interp(size, list(base_s), list(base_s.values()))
        assert device.bucket_s(True, size) == pytest.approx(expected_s, rel=0.02)
        assert device.bucket_s(False, size) == device.bucket_s(True, size)


def test_noise_leaves_the_total_as_measured():
    steps = make_steps(noise=0.3)
    device = calibrate(steps)
    predicted_s = sum(
        device.step_s(
            StepLoad(step.num_slots, step.decode_only, 0, step.decode_context, step.prefill_context)
        )
        for step in steps
    )
    assert predicted_s == pytest.approx(sum(step.duration_s for step in steps), rel=1e-6)
    assert 0.05 < device.fit_error < 0.3


def test_a_late_host_is_part_of_every_step():
    assert calibrate(make_steps(gap_s=0.002)).gap_s == pytest.approx(0.002)


def test_waiting_for_work_is_not_a_late_host():
    idle = [
        recorded(0, 0.0, 1.0, [("a", 0, 4, True)]),
        recorded(1, 9.0, 10.0, [("b", 0, 4, True)]),  # scheduled when it started, at 9
    ]
    assert calibrate(idle).gap_s == 0.0


def test_a_hiccup_is_left_out():
    steps = [recorded(n, n, n + 0.1, [("a", 50, 1, True)]) for n in range(20)]
    steps.append(recorded(20, 20.0, 29.0, [("a", 50, 1, True)]))
    assert calibrate(steps).base_s[True, 8] == pytest.approx(0.1)


def test_a_slope_is_never_negative():
    # Longer contexts took less time, which can only be chance.
    steps = [recorded(n, n, n + 0.2 - 0.001 * n, [("a", 10 * n, 1, True)]) for n in range(50)]
    device = calibrate(steps)
    assert device.decode_context_s == 0.0
    assert device.base_s[True, 8] == pytest.approx(sum(0.2 - 0.001 * n for n in range(50)) / 50)


@pytest.mark.parametrize(
    ("decode_only", "num_slots", "expected_s"),
    [
        (True, 12, 0.0125),  # between 10 and 15 ms
        (True, 4, 0.010),  # as the smallest one known
        (True, 32, 0.030),  # twice the largest one
        (False, 128, 0.100),
        (False, 32, 0.050),
    ],
)
def test_a_bucket_never_seen_is_interpolated(decode_only: bool, num_slots: int, expected_s: float):
    assert calibrate(make_steps()).bucket_s(decode_only, num_slots) == pytest.approx(expected_s)


def test_a_kind_of_step_never_seen_is_taken_for_the_other():
    decodes = [step for step in make_steps() if step.decode_only]
    assert calibrate(decodes).bucket_s(False, 32) == pytest.approx(0.030)


def test_a_calibration_can_be_written_down():
    found = calibrate(make_steps()).as_dict()
    assert [(b["decode_only"], b["num_slots"]) for b in found["base_s"]] == sorted(BASES)


def test_nothing_cannot_be_calibrated():
    with pytest.raises(ValueError, match="no steps"):
        calibrate([])
